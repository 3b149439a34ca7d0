"""Ctrl-C that is not lost: libraries drop it, or make another error of it, for example in the middle of an import."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class _Handler:
    """Raises KeyboardInterrupt, and remembers it."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        raise KeyboardInterrupt

    def check(self) -> None:
        if self.pressed:
            raise KeyboardInterrupt


@contextmanager
def heeded() -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C raises KeyboardInterrupt; an error that ends the block after it ends it as one, too.

    For the main thread. Gives a function that raises KeyboardInterrupt if there was a Ctrl-C that somebody dropped, in
    this block or in one around it.
    """
    before = signal.getsignal(signal.SIGINT)
    handler = before if isinstance(before, _Handler) else _Handler()
    signal.signal(signal.SIGINT, handler)
    try:
        yield handler.check
    except Exception as error:
        if handler.pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unheeded() -> Iterator[None]:
    """Within the block, which is short, nothing comes of Ctrl-C: what was computed is shown. For the main thread."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
