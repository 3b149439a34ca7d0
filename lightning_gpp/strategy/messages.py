"""Messages to the user of a trainer, whose progress bar may be on the screen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from lightning_utilities.core.rank_zero import rank_zero_info


def inform(text: str) -> None:
    """Show a message on global rank 0, above the progress bar if there is one."""
    with _standard_error_of_now():
        rank_zero_info(text)


@contextmanager
def _standard_error_of_now() -> Iterator[None]:
    """Lightning's loggers write to the `sys.stderr` of now instead of the one that they found when they were made.

    A bar of rich replaces `sys.stderr` while it is shown, and prints what is written there above itself. Its next
    update would overwrite what goes past it.
    """
    handlers = [handler for handler in logging.getLogger("lightning.pytorch").handlers if _to_terminal(handler)]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            handler.setStream(stream or sys.__stderr__)


def _to_terminal(handler: logging.Handler) -> TypeGuard[logging.StreamHandler[Any]]:
    return isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stderr__
