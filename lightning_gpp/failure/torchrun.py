"""Error files, from which torchrun's closing summary takes the root cause of a failure."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

_LATER: Final = 60
"""Seconds by which a consequence is dated later than now."""


def record(error: BaseException) -> None:
    """Note the error with which this process fails."""
    get_error_handler().record_exception(error)


def record_consequence(cause: str) -> None:
    """Note that this process ends because of another rank.

    The earliest time, in whole seconds, counts as the root cause, and for a killed process that is the time at which
    torchrun noticed. So a consequence gets a later time than any of these.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    details = {"py_callstack": "", "timestamp": str(int(time.time()) + _LATER)}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": f"PeerFailure: {cause}", "extraInfo": details}}))
