"""Evaluation passes over data, in which mini-batches follow each other without a flush."""

from __future__ import annotations

from lightning_gpp.training.incoming import Incoming
from lightning_gpp.training.segments import Segments
from lightning_gpp.training.session import Session


class EvaluationPass:
    """Numbers the mini-batches of one feed, and divides them into segments.

    Args:
        incoming: announces the mini-batches.
        first: number of the first mini-batch.

    Attributes:
        number: number of the next mini-batch.
    """

    def __init__(self, incoming: Incoming, first: int) -> None:
        self._incoming, self._feed = incoming, incoming.feed
        self._segments = Segments(first)
        self._session: Session | None = None
        self.number = first

    @property
    def is_over(self) -> bool:
        """True if the announced mini-batch comes from another feed."""
        return self._incoming.feed is not self._feed

    def segment(self, session: Session, *, alone: bool) -> range:
        """The segment of the next mini-batch, which was announced. Unknown mini-batches cannot be ahead.

        `alone`: the feed is not that of this evaluation, so the next mini-batches are unknown.
        """
        incoming, self._session = self._incoming, session
        known_ahead = session.lead(incoming.batch_size) <= incoming.feed.ahead()
        return self._segments.enter(self.number, incoming.facts, None if known_ahead and not alone else 1)

    def end(self) -> None:
        """Drop the mini-batches in the pipeline, which exist if a loop was left before its end."""
        if self._session is None or self._session.latest is None:
            return
        program = self._session.latest.program
        if batches := self._segments.on_their_way(self.number, program.lead):
            self._session.give_up(program.batch_size, batches)
