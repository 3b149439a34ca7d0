"""The cause of a job's failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from lightning_gpp.failure.processes import ProcessIdentity

EXIT_CODE: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The cause of a job's failure: the rank that failed first, and the event."""

    rank: int
    process: ProcessIdentity
    action: str
    """The last known activity of the rank."""
    event: str
    """The event as a verb phrase: `raised ValueError: ...`, `was killed by SIGKILL`."""
    reported: bool = False
    """True if the rank reported it itself, and so ends by itself."""
    traceback: str = ""
    code: int = EXIT_CODE
    """The exit code of all ranks."""
    point: str = ""
    """For an exception that other ranks may raise, too: a digest of the point of the program. Else empty."""

    @classmethod
    def of(cls, message: dict[str, Any]) -> Cause:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**message, "process": ProcessIdentity(**message["process"])})

    def __str__(self) -> str:
        last = "doing" if self.reported else "last heard of doing"
        doing = f", {last}: {self.action}" if self.action else ""
        return f"rank {self.rank} (host {self.process.host}, pid {self.process.pid}{doing}) {self.event}"
