"""Trials whether mini-batches fit the memory: all ranks learn what one of them lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from lightning_gpp.training.control import Control

_T = TypeVar("_T")

_LACKS: Final = ("out of memory", "can't allocate memory")
"""Words in messages of torch about devices whose memory is used up."""
_RANK: Final = "rank "


def agreed(control: Control, run: Callable[[], _T]) -> _T:
    """The result of a function that every process calls.

    Raises:
        RuntimeError: on all processes, if it took more memory than one of them has.
    """
    lack, results = "", list[_T]()
    try:
        results.append(run())
    except RuntimeError as error:
        lack = str(error)
        if not any(words in lack for words in _LACKS):
            raise
    for rank, text in enumerate(control.gather_all(lack)):
        if text:
            raise RuntimeError(text if text.startswith(_RANK) else f"{_RANK}{rank}: {text}")
    return results[0]
