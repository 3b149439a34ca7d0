"""A pipeline computes what one process computes: losses, every gradient, and parameters after twenty steps.

Gradients are compared to 1e-12 of the parameter's largest gradient; where that is below a thousandth of the model's
largest, relative to this thousandth (sums that cancel have no relative accuracy).
"""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed
from tests.parity.layouts import FOUR, TWO
from tests.parity.models import SUBJECTS
from tests.parity.worker import run_layouts, run_steps
from tests.sampling import sample

pytest.importorskip("transformers")
pytest.importorskip("sklearn")


@pytest.mark.parametrize("name", sample(SUBJECTS, ["two_tower", "feature_towers", "gpt_text", "clip", "t5"]))
def test_two_ranks(name: str) -> None:
    run_distributed(2, run_layouts, name, TWO)


@pytest.mark.parametrize("name", sample(SUBJECTS, ["two_tower", "feature_towers"]))
def test_four_ranks(name: str) -> None:
    run_distributed(4, run_layouts, name, FOUR)


@pytest.mark.parametrize("name", sample(SUBJECTS, ["two_tower", "clip"]))
def test_twenty_adam_steps_with_clipping(name: str) -> None:
    run_distributed(2, run_steps, name, TWO["2 ranks"], 20)
