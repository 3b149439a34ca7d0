"""Work in bubbles: pieces of other work run while a device waits for a message (PipeFill, arXiv 2410.07192).

    receive ├──────────── as long as in earlier mini-batches ────────────┤ message
            ├─ piece ─┤─ piece ─┤─ piece ─┤   no piece fits: wait

A wait counts as long as it was in earlier mini-batches, so that it needs no simulation, and the first mini-batch has no
pieces. A piece begins only if the longest of the recent ones, but the very first, fits into what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

import torch

from lightning_gpp.errors import add_note
from lightning_gpp.runtime.random import undisturbed

_SHORTEST: Final = 1e-3
"""Seconds of a wait for which it is worth to begin."""
_RETRYING: Final = 0.999
"""Factor by which the longest piece counts less after a wait that was too short for it, so that it is tried again."""
_FORGETTING: Final = 0.95
"""Factor by which the longest piece counts less with each other one, and a wait more with each mini-batch."""


class Work(Protocol):
    """A transfer in progress; torch's own work objects have this form."""

    def wait(self) -> object:
        """Return when it is done; on CUDA, when work issued to the current stream from now on runs after it."""
        ...

    def is_completed(self) -> bool:
        """True if it is known to be done, which gloo does not know before `wait()`."""
        ...


class Bubbles:
    """The waits of a device, and what fills them.

    Attributes:
        pieces: the pieces that are left; None if there are none.
        number: pieces that have been run.
        waited: seconds of all waits for messages since `fill`, from their begin to the arrival of the message.
        used: seconds in which pieces were run during waits.
        late: seconds by which pieces went on after a message had arrived.
    """

    def __init__(self) -> None:
        self.number, self.waited, self.used, self.late = 0, 0.0, 0.0, 0.0
        self._on_gpu = False
        self.pieces: Iterator[object] | None = None
        self._longest, self._is_first = 0.0, True
        self._waiter: ThreadPoolExecutor | None = None

    def fill(self, pieces: Iterable[object], device: torch.device) -> None:
        """Run a piece on a device with each item that is taken from an iterable; they replace earlier ones."""
        self.pieces, self._on_gpu = iter(pieces), device.type == "cuda"
        self._longest, self._is_first = 0.0, True
        self._waiter = self._waiter or ThreadPoolExecutor(1, "bubbles")

    def end(self) -> None:
        """Run no more pieces."""
        self.pieces = None
        if self._waiter is not None:
            self._waiter.shutdown()
            self._waiter = None

    def rest(self) -> None:
        """Run the pieces that are left, all at once."""
        with undisturbed(), torch.no_grad():
            while self.pieces is not None:
                self._run_piece()

    def wait(self, work: Work, expected: float) -> float:
        """Wait for a message, and run pieces meanwhile.

        Args:
            work: the receive.
            expected: seconds that the wait may take.

        Returns:
            The seconds that it may take next time.
        """
        start = time.perf_counter()
        stop = self._run_while(work, start, start + expected) if self._fits(expected) else None
        if stop is None:
            work.wait()
            stop = time.perf_counter()
            self._longest *= _RETRYING
        self.waited += stop - start
        return min(stop - start, expected / _FORGETTING) if expected else stop - start

    def _run_while(self, work: Work, start: float, end: float) -> float:
        """Run pieces until a message has arrived, or none fits before `end`. Returns the time of its arrival."""
        has_arrived, arrival = self._watched(work)
        self._synchronize()
        with undisturbed(), torch.no_grad():
            while not has_arrived() and self._fits(end - time.perf_counter()):
                self._run_piece()
        last, stop = time.perf_counter(), arrival()
        self.used += min(last, stop) - start
        self.late += max(0.0, last - stop)
        return stop

    def _watched(self, work: Work) -> tuple[Callable[[], bool], Callable[[], float]]:
        """Tells whether a message has arrived; and waits for it, and returns when it arrived."""
        if self._on_gpu or self._waiter is None:
            return work.is_completed, lambda: _arrival(work)
        arriving: Future[float] = self._waiter.submit(_arrival, work)  # gloo tells only those who wait
        return arriving.done, arriving.result

    def _fits(self, seconds: float) -> bool:
        return self.pieces is not None and seconds > max(self._longest, _SHORTEST)

    def _run_piece(self) -> None:
        start = time.perf_counter()
        try:
            for _ in self.pieces or ():
                break
            else:
                self.pieces = None
                return
            self._synchronize()
        except Exception as error:
            add_note(error, "This happened in a piece of work that fills the bubbles of a pipeline.")
            raise
        self.number += 1
        if not self._is_first:  # which has to load and to allocate what the others find
            self._longest = max(time.perf_counter() - start, _FORGETTING * self._longest)
        self._is_first = False

    def _synchronize(self) -> None:
        """Let work on a GPU end, so that pieces take as long as they seem to."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()


def _arrival(work: Work) -> float:
    work.wait()
    return time.perf_counter()
