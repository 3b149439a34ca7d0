"""A plan that was made for another width of the model, or another mini-batch, gets the sizes of these."""

from __future__ import annotations

import torch

from lightning_gpp import Options, Plan
from lightning_gpp.capture import capture_step
from lightning_gpp.training.planner import plan_for
from tests.strategy.harness import STAGES, TwoTowers


def plan(width: int, samples: int, options: Options) -> Plan:
    batch = torch.zeros(samples, 4), torch.zeros(samples, 3), torch.zeros(samples, dtype=torch.int64)
    return plan_for(capture_step(TwoTowers(width), batch), options, 2)


def test_a_plan_for_another_model_and_mini_batch() -> None:
    stages = Options(stages=STAGES, micro_batch_size=4)
    given = plan(6, 16, stages)
    expected = plan(12, 8, stages)
    assert expected.edges != given.edges
    assert plan(12, 8, Options(plan=given)) == expected
    assert plan(6, 16, Options(plan=given)) == given
