"""Every schedule computes what the plain model computes, whatever the model's shape and whoever shares the work."""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed
from tests.parity.matrix import NUM_PROCESSES, run_all
from tests.parity.shapes import MODELS

RARER = ("chain", "skip connections", "decoder", "translator")


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.acceptance) if name in RARER else name for name in MODELS]
)
def test_every_schedule_equals_one_process(model: str) -> None:
    """Losses, all gradients, and the micro-batches in flight that the simulator counts; nothing is left unsplit."""
    by_rank = run_distributed(NUM_PROCESSES, run_all, model)
    assert not any(by_rank), "\n".join(trouble for found in by_rank for trouble in found)
