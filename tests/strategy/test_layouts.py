"""Settings that lay stages out: what excludes what is said before there is a model."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpp import GPPStrategy
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import STEP, Edge, Plan, Stage
from lightning_gpp.training.planner import contradicted
from tests.strategies import chain


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"schedule": "zbv", "max_replicas": 2}, r"'zbv' puts every stage on one device.*num_pipelines.*1f1b"),
        ({"schedule": "1f1b", "stages_per_device": 2, "max_replicas": 3}, "puts every stage on one device"),
        (
            {"schedule": "chimera", "stages": [{"modules": ["a"], "devices": [0]}, {"modules": ["b"], "devices": [1]}]},
            r"'chimera' gives every stage a second device.*leave `devices` out",
        ),
        ({"stages_per_device": 0}, "strategy.stages_per_device is 0; it must be a whole number >= 1"),
        (
            {"stages_per_device": 2, "stages": [{"modules": ["a"], "devices": [0]}, {"modules": ["b"]}]},
            "strategy.stages_per_device=2 cannot move .* `devices`: these already have devices. Leave it out",
        ),
        (
            {"stages_per_device": 2, "plan": chain([1, 1], 4)},
            "per_device=2 cannot move the stages of strategy.plan",
        ),
        ({"sharding": "zero2"}, "strategy.sharding is 'zero2'; it must be one of 'none', 'auto', 'zero1', 'fsdp'"),
    ],
)
def test_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        GPPStrategy(**settings)


def test_what_a_plan_contradicts_is_said() -> None:
    stages = tuple(
        Stage(name=name, modules=(name,), devices=devices, micro_batch_size=4)
        for name, devices in (("a", (1, 2)), (STEP, (0,)))
    )
    plan = Plan(stages=stages, edges=(Edge(src=0, dst=1),), batch_size=8)
    agreeing = GPPStrategy(plan=plan, micro_batch_size=4, max_replicas=2)
    assert contradicted(plan, agreeing.options) == []
    assert contradicted(plan, GPPStrategy(plan=plan, num_micro_batches=2).options) == []
    other = GPPStrategy(plan=plan, num_micro_batches=4, max_replicas=1)
    assert contradicted(plan, other.options) == ["strategy.num_micro_batches=4", "strategy.max_replicas=1"]


def test_allowed() -> None:
    assert GPPStrategy(schedule="zbv", max_replicas=1).options.schedule == "zbv"
    assert GPPStrategy(schedule="chimera", stages=[{"modules": ["a"]}, {"modules": ["b"]}]).options.stages is not None
    assert GPPStrategy().options.schedule is None
