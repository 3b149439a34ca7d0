"""Private names of Lightning around processes: launchers, whose processes handle their exceptions."""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import Callable
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_gpp.failure.processes import exit_now

_LAST: Final = 60.0
"""Seconds for which the first process waits at its end for each one that it has started."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the script again for every further process; none of them outlives the first one for long."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` here, after the other processes have been started, which run it, too."""
        if not self.cluster_environment.creates_processes_externally:
            atexit.register(self.end)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def end(self, patience: float = _LAST) -> None:
        """Take the exit code of a process that has failed after the run, when nobody watches; Lightning ignores them.

        A process that does not end, as one that is stopped, is ended.
        """
        for process in self.procs:
            try:
                code = process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                exit_now(max(code, 1))
