"""`offload`: who decides, what is refused, and a whole run that computes the same numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lightning_gpp import ConfigError, GPPStrategy, PlanError
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.reports import plan_table
from lightning_gpp.training.evaluation_plan import evaluation_plan
from lightning_gpp.training.planner import plan_for, refitted
from tests.strategies import offloading
from tests.strategy import harness
from tests.strategy.harness import loader, make_data, make_module
from tests.strategy.test_recompute import Noisy, captured

LISTED = [
    {"name": "left", "modules": ["left"], "devices": [1], "offload": True},
    {"name": "right", "modules": ["right"], "devices": [2]},
    {"name": "rest", "modules": ["head", STEP], "devices": [0]},
]


def offloaded(plan: Plan) -> list[str]:
    return [stage.name for stage in plan.stages if stage.offload]


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        *((None, ["left"]), ("auto", ["left"]), (True, ["left", "right"]), (False, []), ((), [])),
        *((["right"], ["right"]), (["rest"], ["rest"])),
    ],
)
def test_the_setting_overrides_the_plan(offload: Any, expected: list[str], tmp_path: Path) -> None:
    options = GPPStrategy(stages=LISTED, offload=offload).options
    plan = plan_for(captured(), options, 3)
    assert offloaded(plan) == expected
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    given = GPPStrategy(plan=plan_for(captured(), GPPStrategy(stages=LISTED).options, 3), offload=offload)
    assert offloaded(plan_for(captured(), given.options, 3)) == expected


def test_what_leaves_the_device_is_all_but_the_inputs() -> None:
    kept, moved = (
        plan_for(captured(), GPPStrategy(stages=LISTED, offload=o).options, 3) for o in (False, ["left", "rest"])
    )
    for before, after in zip(kept.stages, moved.stages, strict=True):
        whole = after.figures.activation_bytes + after.figures.offloaded_bytes
        assert whole == before.figures.activation_bytes
        assert bool(after.figures.offloaded_bytes.at(1)) == after.offload
    assert moved.stages[0].figures.activation_bytes.at(1) == 0  # it reads data, which get no gradients
    received = sum(edge.bytes.at(1) for edge in moved.edges if edge.dst == 2)
    assert moved.stages[2].figures.activation_bytes.at(1) == received > 0


def test_other_forms_of_the_plan() -> None:
    plan = plan_for(captured(), GPPStrategy(stages=LISTED, chain_baseline=True).options, 3)
    assert offloaded(plan) == ["left"]
    assert offloaded(refitted(captured(), plan)) == ["left"]
    assert offloaded(evaluation_plan(captured(), plan)) == ["left"]


def test_plan_files_without_the_key_load(tmp_path: Path) -> None:
    plan = plan_for(captured(), GPPStrategy(stages=LISTED, offload=False).options, 3)
    plan.save(path := tmp_path / "plan.yaml")
    content = yaml.safe_load(path.read_text())
    for stage in content["stages"]:
        del stage["offload"], stage["figures"]["offloaded_bytes"]
    path.write_text(yaml.safe_dump(content))
    assert Plan.load(path) == offloading(plan, False)


def test_the_table_marks_offloaded_stages() -> None:
    lines = plan_table(plan_for(captured(), GPPStrategy(stages=LISTED).options, 3)).splitlines()
    assert ["(offloaded)" in line for line in lines if re.match(r"\| \d", line)] == [True, False, False]


@pytest.mark.parametrize("value", ["left", 1, [1], {"left": True}])
def test_a_value_of_another_kind(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"strategy.offload is {re.escape(repr(value))}; it must be true, false, a"):
        GPPStrategy(offload=value)


def test_an_unknown_stage() -> None:
    options = GPPStrategy(stages=LISTED, offload=["left", "up"]).options
    with pytest.raises(ConfigError, match=r"offload lists \['up'\]; the stages of the plan are \['left', 'right', 're"):
        plan_for(captured(), options, 3)


def test_with_recomputation() -> None:
    options = GPPStrategy(stages=LISTED, recompute=["left"]).options
    with pytest.raises(
        PlanError, match=r"Stage 'left' has offload=true and recompute=true: it would keep only its inp"
    ):
        plan_for(captured(), options, 3)
    plan = plan_for(captured(), GPPStrategy(stages=LISTED, recompute=["left.0"]).options, 3)
    assert (plan.stages[0].offload, plan.stages[0].recompute) == (True, ("left.0",))


def test_the_key_of_a_stage_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match=r"strategy.stages\[0\].offload is 'left'; it must be true or false"):
        GPPStrategy(stages=[{"modules": ["left"], "offload": "left"}])
    stage = Stage(name="all", modules=(STEP,), devices=(0,), micro_batch_size=2)
    with pytest.raises(PlanError, match=r"Stage 'all': offload is 'no'; it must be true or false"):
        Plan(stages=(replace(stage, offload="no"),), edges=(), batch_size=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("offload", [True, "auto", ["left"]])
def test_with_slices_and_with_members(offload: Any) -> None:
    with pytest.raises(ConfigError, match=r"strategy.slices=2 cannot be combined with strategy.offload=.* hand on"):
        GPPStrategy(offload=offload, slices=2)
    with pytest.raises(
        ConfigError, match=r"strategy.offload=.* does not go together with strategy.tensor_parallel_size"
    ):
        GPPStrategy(offload=offload, tensor_parallel_size=2)


def test_slices_of_a_stage_that_offloads() -> None:
    stages = tuple(
        Stage(name=f"s{i}", modules=("a",), devices=(1,), micro_batch_size=1, tokens=(i, i + 1), offload=True)
        for i in range(2)
    )
    with pytest.raises(PlanError, match=r"Stage 's0' has offload=true, but is a slice.*strategy.slices"):
        Plan(
            stages=(*stages, Stage(name="s", modules=(STEP,), devices=(0,), micro_batch_size=1)), edges=(), batch_size=1
        )


def fit(rank: int, offload: Any, precision: str, weights: str) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    module = Noisy().double() if precision == "64-true" else Noisy()
    strategy = harness.strategy(offload=offload, self_check=False, weights=weights)
    trainer = harness.trainer(strategy, 2, precision=precision)
    data = make_data(22) if precision == "64-true" else [(a.float(), b.float(), y) for a, b, y in make_data(22)]
    loaders = [torch.utils.data.DataLoader(data, batch_size=8, drop_last=weights != "synchronous") for _ in range(2)]
    trainer.fit(module, *loaders)
    assert strategy.plan is not None
    assert offloaded(strategy.plan) == (offload or [])
    state = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    return {"losses": module.losses, "metrics": module.metrics, "state": state}


ARITHMETICS = [("64-true", "synchronous"), ("bf16-mixed", "synchronous"), ("64-true", "stash")]


def fit_all(rank: int) -> list[dict[str, Any]]:
    """Kept and offloaded: in float64, in mixed precision, and without a flush."""
    return [fit(rank, offload, *how) for how in ARITHMETICS for offload in (None, ["left", "right+head"])]


def test_a_whole_run_computes_the_same() -> None:
    for found in harness.run(2, fit_all):
        for kept, moved in zip(found[::2], found[1::2], strict=True):
            assert moved == kept


def fit_checked(rank: int) -> list[float]:
    module = make_module()
    harness.trainer(harness.strategy(offload=True, self_check=True), 2).fit(module, loader(), loader(10, seed=2))
    return module.losses


def test_the_self_check_runs_offloaded_stages() -> None:
    losses, _ = harness.run(2, fit_checked)
    assert len(losses) == 6
