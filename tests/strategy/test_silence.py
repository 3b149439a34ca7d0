"""Warnings of Lightning that do not hold are shown again after a run."""

from __future__ import annotations

import warnings

from lightning_gpp.strategy.ranks import Silence


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
