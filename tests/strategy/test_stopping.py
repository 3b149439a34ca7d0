"""`trainer.should_stop` on one rank stops all after the same step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from tests.strategy import harness


class Stops(pl.Callback):
    """Sets `should_stop` on one rank, in a hook at a step."""

    def __init__(self, rank: int, hook: str, step: int) -> None:
        def stop(trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_rank == rank and trainer.global_step == step and not trainer.sanity_checking:
                trainer.should_stop = True

        setattr(self, hook, stop)


def steps(rank: int, options: dict[str, Any], stops: tuple[int, str, int]) -> int:
    trainer = harness.trainer(
        harness.strategy(self_check=False, **options),
        devices=2,
        max_epochs=10,
        val_check_interval=5,
        callbacks=[Stops(*stops)],
    )
    trainer.fit(harness.make_module(), harness.loader(10 * 8), harness.loader(8))
    return int(trainer.global_step)


PIPELINES = {"stages": None, "num_pipelines": 2}


CASES: list[tuple[dict[str, Any], tuple[int, str, int], int]] = [
    ({}, (1, "on_train_batch_end", 3), 5),
    ({"weights": "stash"}, (1, "on_train_batch_end", 3), 5),
    ({}, (1, "on_train_epoch_end", 10), 10),
]
"""Options, the rank that stops with its hook and step, and the last step."""
MORE: list[tuple[dict[str, Any], tuple[int, str, int], int]] = [
    ({}, (0, "on_train_batch_end", 3), 3),
    (PIPELINES, (1, "on_train_batch_end", 3), 5),
    ({}, (1, "on_validation_end", 5), 5),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.acceptance)], ids=["few", "more"])
def test_one_rank_stops_all(cases: Any) -> None:
    """At once if rank 0 says so, or if all have nothing under way; otherwise after the next validation."""
    found = harness.run_each(2, steps, [case[:2] for case in cases])
    assert found == [[last] * 2 for *_, last in cases]
