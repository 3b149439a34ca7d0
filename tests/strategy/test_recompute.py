"""`recompute`: who decides, what is refused, and a whole run that computes the same numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn

from lightning_gpp import ConfigError, GPPStrategy, PlanError
from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.reports import plan_table
from lightning_gpp.training.evaluation_plan import evaluation_plan
from lightning_gpp.training.planner import plan_for, refitted
from tests.strategies import rerunning
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader, make_data, make_module

LISTED = [
    {"name": "left", "modules": ["left"], "devices": [1], "recompute": True},
    {"name": "right", "modules": ["right"], "devices": [2]},
    {"name": "rest", "modules": ["head", STEP], "devices": [0]},
]


def captured(step: str = "training_step") -> Capture:
    module = make_module()
    module.log = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    return capture_step(module, make_data(8)[:], step=step)


def recomputed(plan: Plan) -> list[str]:
    return [stage.name for stage in plan.stages if stage.recompute]


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [(None, ["left"]), (True, ["left", "right"]), (False, []), (["right"], ["right"]), ((), [])],
)
def test_the_setting_overrides_the_plan(recompute: Any, expected: list[str], tmp_path: Path) -> None:
    strategy = GPPStrategy(stages=LISTED, recompute=recompute)
    plan = plan_for(captured(), strategy.options, 3)
    assert recomputed(plan) == expected
    plan_for(captured(), strategy.options, 3).save(tmp_path / "plan.yaml")
    assert recomputed(Plan.load(tmp_path / "plan.yaml")) == expected
    given = GPPStrategy(plan=plan_for(captured(), GPPStrategy(stages=LISTED).options, 3), recompute=recompute)
    assert recomputed(plan_for(captured(), given.options, 3)) == expected


def test_other_forms_of_the_plan_keep_it() -> None:
    plan = plan_for(captured(), GPPStrategy(stages=LISTED, chain_baseline=True).options, 3)
    assert recomputed(plan) == ["left"]
    assert recomputed(refitted(captured(), plan)) == ["left"]
    assert recomputed(evaluation_plan(captured(), plan)) == ["left"]


def test_plan_files_without_the_key_load(tmp_path: Path) -> None:
    plan = plan_for(captured(), GPPStrategy(stages=LISTED).options, 3)
    plan.save(path := tmp_path / "plan.yaml")
    content = yaml.safe_load(path.read_text())
    for stage in content["stages"]:
        del stage["recompute"]
    path.write_text(yaml.safe_dump(content))
    assert not recomputed(Plan.load(path))
    assert Plan.load(path) == rerunning(plan, False)


def test_the_table_marks_recomputed_stages() -> None:
    lines = plan_table(plan_for(captured(), GPPStrategy(stages=LISTED).options, 3)).splitlines()
    assert ["(recomputed)" in line for line in lines if re.match(r"\| \d", line)] == [True, False, False]


@pytest.mark.parametrize("value", ["left", 1, [1], {"left": True}])
def test_a_value_of_another_kind(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"strategy.recompute is {re.escape(repr(value))}; it must be true, false, a"
    ):
        GPPStrategy(recompute=value)


def test_an_unknown_stage() -> None:
    options = GPPStrategy(stages=LISTED, recompute=["left", "up"]).options
    with pytest.raises(ConfigError, match=r"lists \['up'\]; the stages that can be recomputed are \['left', 'right'\]"):
        plan_for(captured(), options, 3)


def test_the_stage_of_the_step() -> None:
    options = GPPStrategy(stages=LISTED, recompute=["rest"]).options
    with pytest.raises(ConfigError, match=r"lists stage 'rest', which runs the training step.*'@step' a stage of its"):
        plan_for(captured(), options, 3)
    placement = [{**entry, "recompute": True} for entry in LISTED]
    with pytest.raises(PlanError, match=r"Stage 'rest' has recompute=true, but it runs the user's step \('@step'\)"):
        plan_for(captured(), GPPStrategy(stages=placement).options, 3)


def test_the_key_of_a_stage_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match=r"strategy.stages\[0\].recompute is 'left'; it must be true or false"):
        GPPStrategy(stages=[{"modules": ["left"], "recompute": "left"}])
    stage = Stage(name="all", modules=(STEP,), devices=(0,), micro_batch_size=2)
    with pytest.raises(PlanError, match=r"Stage 'all': recompute is 'no'; it must be true or false"):
        Plan(stages=(replace(stage, recompute="no"),), edges=(), batch_size=8)  # type: ignore[arg-type]


class Noisy(TwoTowers):
    """With dropout, and with statistics that validation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 6))


def fit(rank: int, recompute: bool | None, precision: str) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    module = Noisy().double() if precision == "64-true" else Noisy()
    strategy = harness.strategy(recompute=recompute, self_check=False)
    trainer = harness.trainer(strategy, 2, precision=precision)
    data = make_data(22) if precision == "64-true" else [(a.float(), b.float(), y) for a, b, y in make_data(22)]
    loaders = [torch.utils.data.DataLoader(data, batch_size=8) for _ in range(2)]
    trainer.fit(module, *loaders)
    assert strategy.plan is not None
    assert recomputed(strategy.plan) == (["left"] if recompute else [])
    state = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    return {"losses": module.losses, "metrics": module.metrics, "state": state}


def fit_all(rank: int) -> list[dict[str, Any]]:
    """Kept and recomputed, in float64 and in mixed precision."""
    return [fit(rank, recompute, precision) for precision in ("64-true", "bf16-mixed") for recompute in (None, True)]


def test_a_whole_run_computes_the_same() -> None:
    for kept, again, kept_mixed, again_mixed in harness.run(2, fit_all):
        assert again == kept
        assert again_mixed == kept_mixed
        assert kept["losses"] != kept_mixed["losses"]


def fit_checked(rank: int) -> list[float]:
    module = make_module()
    harness.trainer(harness.strategy(recompute=True, self_check=True), 2).fit(module, loader(), loader(10, seed=2))
    return module.losses


def test_the_self_check_runs_recomputed_stages() -> None:
    losses, _ = harness.run(2, fit_checked)
    assert len(losses) == 6
