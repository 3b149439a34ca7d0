"""The cause of a job's end: what a rank tells the others, and the launcher, about its failure."""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_gpp.errors import GPPError, PeerFailure
from lightning_gpp.failure.processes import ProcessIdentity
from lightning_gpp.user_code import UNKNOWN, is_own_code, line_of

EXIT_CODE: Final = 1
_SHORT: Final = 8
"""Innermost frames of a traceback that are sent to the other ranks."""
_LATER: Final = 60
"""Seconds by which a consequence is dated later than now."""
_HERE: Final = Path(__file__).parents[1]
_COMMUNICATION: Final = (
    str(Path(torch.__file__).parent / "distributed"),
    *(str(_HERE / part) for part in ("runtime", "training/control.py", "training/updates/gradients.py")),
)
"""The code that sends, receives and waits; errors of connections come out of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The cause of a job's end: the rank that failed first, and the event."""

    rank: int
    process: ProcessIdentity
    action: str
    """The last known activity of the rank."""
    event: str
    """The event as a verb phrase: `raised ValueError: ...`, `was killed by SIGKILL`."""
    reported: bool = False
    """True if the rank reported it itself."""
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


def told(error: BaseException) -> str:
    """The error, with the line of the user's code that it comes from; errors of this library say what they need."""
    words, line = f"{type(error).__name__}: {error}", line_of(error)
    return words if isinstance(error, GPPError) or line == UNKNOWN else f"{words} ({line})"


def short_trace(error: BaseException) -> str:
    """The traceback of the user's code, and of what it calls: its innermost frames, without those of this library."""
    shown = traceback.TracebackException.from_exception(error, limit=-_SHORT)
    own = [position for position, frame in enumerate(shown.stack) if is_own_code(frame.filename)]
    if own and own[-1] + 1 < len(shown.stack):
        del shown.stack[: own[-1] + 1]
    return "".join(shown.format())


def point_of(error: BaseException) -> str:
    """A digest of an exception's type and of the point of the program where it was raised.

    This library's own frames do not count: a hook may be called in other ways on the rank that runs the step.
    """
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    others = [frame for frame in frames if not is_own_code(frame[0])]
    return hashlib.sha256(repr((type(error).__qualname__, others)).encode()).hexdigest()[:16]


def is_consequence(error: BaseException | None) -> bool:
    """True if an error may only follow from the end of another rank: communication has raised it."""
    if error is None:
        return False
    if isinstance(error, (dist.DistError, ConnectionError, PeerFailure)):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    there = bool(frames) and frames[-1].f_code.co_filename.startswith(_COMMUNICATION)
    return (type(error) is RuntimeError and there) or is_consequence(error.__cause__ or error.__context__)


def record(error: BaseException) -> None:
    """Note the error with which this process fails in torchrun's error file."""
    get_error_handler().record_exception(error)


def record_consequence(cause: str) -> None:
    """Note in torchrun's error file that this process ends because of another rank.

    The earliest time, in whole seconds, counts as the root cause, and for a killed process that is the time at which
    torchrun noticed. So a consequence gets a later time than any of these.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    details = {"py_callstack": "", "timestamp": str(int(time.time()) + _LATER)}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": f"PeerFailure: {cause}", "extraInfo": details}}))
