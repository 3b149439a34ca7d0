"""The line of code at which the main thread is, seen from another thread."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import torch

_HERE: Final = str(Path(__file__).parents[1])
"""The folder of this library."""
_TORCH: Final = str(Path(torch.__file__).parent)
_STANDARD: Final = sysconfig.get_path("stdlib")
_INSTALLED: Final = sysconfig.get_path("purelib")
"""Inside the standard library's folder, but users' code may be there."""
_LIGHTNING: Final = tuple(
    str(Path(_INSTALLED, name)) for name in ("lightning", "lightning_fabric", "pytorch_lightning")
)


def main_thread() -> str:
    """The innermost line of the main thread, and its innermost line in user code, if that is another one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(outwards(frame))
    chosen = [*frames[:1], *[each for each in frames if is_of_user(each.f_code.co_filename)][:1]]
    return ", called from ".join(dict.fromkeys(map(_line, chosen)))


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_of_user(path: str) -> bool:
    """True for a file of the user's code, or of a package that it uses."""
    if path.startswith((_HERE, _TORCH, *_LIGHTNING, "<")):
        return False
    return path.startswith(_INSTALLED) or not path.startswith(_STANDARD)


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
