"""Messages while a progress bar is on the screen."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import Progress

from lightning_gpp.strategy.messages import inform
from lightning_gpp.strategy.silence import Silence


@contextmanager
def handler_to(stream: TextIO | None) -> Iterator[logging.StreamHandler[TextIO]]:
    """Lightning's logger has a handler that writes to a stream, as it has outside of pytest."""
    handler = logging.StreamHandler(stream)
    logging.getLogger(pl.__name__).addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger(pl.__name__).removeHandler(handler)


def test_a_message_is_printed_above_the_bar() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    with handler_to(sys.__stderr__) as handler, Progress(console=screen) as bar:
        bar.add_task("Epoch 0", total=2)
        inform("the first row\nthe last row")
        assert handler.stream is sys.__stderr__
    assert "the first row\nthe last row\n" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_other_streams_stay_as_they_are() -> None:
    own = io.StringIO()
    with handler_to(own):
        inform("to a stream of the user's")
    assert own.getvalue() == "to a stream of the user's\n"


def test_warnings_are_shown_again_after_the_run() -> None:
    advice = "It is recommended to use `self.log('a', ..., sync_dist=True)`"
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence = Silence(num_pipelines=1)
        warnings.filterwarnings("ignore", message="the user's own")
        warnings.warn(advice, stacklevel=1)
        silence.end()
        warnings.warn(advice, stacklevel=1)
        warnings.warn("the user's own", stacklevel=1)
    assert [str(each.message) for each in shown] == [advice]
