"""Every schedule computes what the plain model computes, whatever the model's shape and whoever shares the work."""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed
from tests.parity.matrix import NUM_PROCESSES, run_all
from tests.parity.shapes import MODELS

SHARES = {"two towers": slice(0, None, 2), "encoder and decoder": slice(1, None, 2)}
"""Every schedule in every variant, on one of two models."""


def check(model: str, share: slice) -> None:
    """Losses, all gradients, and the micro-batches in flight that the simulator counts; nothing is left unsplit."""
    by_rank = run_distributed(NUM_PROCESSES, run_all, model, share)
    assert not any(by_rank), "\n".join(trouble for found in by_rank for trouble in found)


@pytest.mark.parametrize("model", SHARES)
def test_every_schedule_equals_one_process(model: str) -> None:
    check(model, SHARES[model])


@pytest.mark.acceptance
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_on_every_model(model: str) -> None:
    check(model, slice(None))
