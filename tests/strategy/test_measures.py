"""`recompute` and `offload`: who decides, what is refused, and whole runs that compute the same numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_gpp import ConfigError, GPPStrategy, PlanError
from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.reports import plan_table
from lightning_gpp.training.evaluation_plan import evaluation_plan
from lightning_gpp.training.planner import plan_for, refitted
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, make_data, make_module

MEASURES = ("recompute", "offload")


def listed(**of_left: Any) -> list[dict[str, Any]]:
    """Three stages, the first with these keys."""
    return [
        {"name": "left", "modules": ["left"], "devices": [1], **of_left},
        {"name": "right", "modules": ["right"], "devices": [2]},
        {"name": "rest", "modules": ["head", STEP], "devices": [0]},
    ]


def captured() -> Capture:
    module = make_module()
    module.log = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    return capture_step(module, make_data(8)[:])


def planned(measure: str, **options: Any) -> Plan:
    """The plan of stages of which the first has the measure."""
    return plan_for(captured(), GPPStrategy(**{"stages": listed(**{measure: True}), **options}).options, 3)


def chosen(plan: Plan, measure: str) -> list[str]:
    return [stage.name for stage in plan.stages if getattr(stage, measure)]


@pytest.mark.parametrize(
    ("measure", "setting", "expected"),
    [
        *((measure, None, ["left"]) for measure in MEASURES),
        *((measure, True, ["left", "right"]) for measure in MEASURES),
        *((measure, setting, []) for measure in MEASURES for setting in (False, ())),
        *((measure, ["right"], ["right"]) for measure in MEASURES),
        *(("offload", "auto", ["left"]), ("offload", ["rest"], ["rest"])),
    ],
)
def test_the_setting_overrides_the_plan(measure: str, setting: Any, expected: list[str], tmp_path: Path) -> None:
    plan = planned(measure, **{measure: setting})
    assert chosen(plan, measure) == expected
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    given = planned(measure, stages=None, plan=planned(measure), **{measure: setting})
    assert chosen(given, measure) == expected


@pytest.mark.parametrize("measure", MEASURES)
def test_other_forms_of_the_plan_keep_it(measure: str) -> None:
    plan = planned(measure, chain_baseline=True)
    for form in (plan, refitted(captured(), plan), evaluation_plan(captured(), plan)):
        assert chosen(form, measure) == ["left"]
    lines = plan_table(plan).splitlines()
    assert [f"({measure.rstrip('e')}ed)" in line for line in lines if re.match(r"\| \d", line)] == [True, False, False]


def test_what_leaves_the_device_is_all_but_the_inputs() -> None:
    kept, moved = (planned("offload", offload=setting) for setting in (False, ["left", "rest"]))
    for before, after in zip(kept.stages, moved.stages, strict=True):
        whole = after.figures.activation_bytes + after.figures.offloaded_bytes
        assert whole == before.figures.activation_bytes
        assert bool(after.figures.offloaded_bytes.at(1)) == after.offload
    assert moved.stages[0].figures.activation_bytes.at(1) == 0  # it reads data, which get no gradients
    received = sum(edge.bytes.at(1) for edge in moved.edges if edge.dst == 2)
    assert moved.stages[2].figures.activation_bytes.at(1) == received > 0


@pytest.mark.parametrize("measure", MEASURES)
def test_values_of_another_kind_and_unknown_stages(measure: str) -> None:
    for value in ("left", 1, [1], {"left": True}):
        match = rf"strategy.{measure} is {re.escape(repr(value))}; it must be true, false, a"
        with pytest.raises(ConfigError, match=match):
            GPPStrategy(**{measure: value})
    with pytest.raises(ConfigError, match=rf"strategy.stages\[0\].{measure} is 'left'; it must be true or false"):
        GPPStrategy(stages=listed(**{measure: "left"}))
    with pytest.raises(ConfigError, match=r"lists \['up'\]; the stages .* are \['left', 'right'"):
        planned(measure, **{measure: ["left", "up"]})


def test_the_stage_of_the_step_is_not_recomputed() -> None:
    with pytest.raises(ConfigError, match=r"lists stage 'rest', which runs the training step.*List others"):
        planned("recompute", recompute=["rest"])
    with pytest.raises(PlanError, match=r"Stage 'rest' has recompute=true, but it runs the user's step \('@step'\)"):
        planned("recompute", stages=[{**entry, "recompute": True} for entry in listed()])


def test_offload_does_not_go_with_everything() -> None:
    with pytest.raises(PlanError, match=r"Stage 'left' has offload=true and recompute=true"):
        planned("offload", recompute=["left"])
    blocks = planned("offload", recompute=["left.0"]).stages[0]
    assert (blocks.offload, blocks.recompute) == (True, ("left.0",))
    with pytest.raises(ConfigError, match=r"strategy.offload=True does not go together with strategy.slices=2"):
        GPPStrategy(offload=True, slices=2)
    with pytest.raises(ConfigError, match=r"strategy.offload=.* does not go together with strategy.tensor_parallel_s"):
        GPPStrategy(offload="auto", tensor_parallel_size=2)
    sliced = Stage(name="s0", modules=("a",), devices=(1,), micro_batch_size=1, tokens=(0, 1), offload=True)
    step = Stage(name="s", modules=(STEP,), devices=(0,), micro_batch_size=1)
    with pytest.raises(PlanError, match=r"Stage 's0' has offload=true, but is a slice.*Leave out offload"):
        Plan(stages=(sliced, replace(sliced, name="s1", tokens=(1, 2)), step), edges=(), batch_size=1)


class Noisy(TwoTowers):
    """With dropout, and with statistics that validation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 6))


def fit(precision: str, weights: str, measures: dict[str, list[str]]) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    module = Noisy().double() if precision == "64-true" else Noisy()
    strategy = harness.strategy(weights=weights, self_check=bool(measures), **measures)
    trainer = harness.trainer(strategy, 2, precision=precision)
    data = make_data(22) if precision == "64-true" else [(a.float(), b.float(), y) for a, b, y in make_data(22)]
    loaders = [torch.utils.data.DataLoader(data, batch_size=8, drop_last=weights != "synchronous") for _ in range(2)]
    trainer.fit(module, *loaders)
    assert strategy.plan is not None
    assert all(chosen(strategy.plan, measure) == stages for measure, stages in measures.items())
    state = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    return {"losses": module.losses, "metrics": module.metrics, "state": state}


OFFLOADED, RECOMPUTED = {"offload": ["left", "right+head"]}, {"recompute": ["left"]}
RUNS: list[tuple[str, str, list[dict[str, list[str]]]]] = [
    ("64-true", "synchronous", [RECOMPUTED, OFFLOADED]),
    ("bf16-mixed", "synchronous", [RECOMPUTED, OFFLOADED]),
    ("64-true", "stash", [OFFLOADED]),
]


def fit_all(rank: int, runs: slice) -> list[list[dict[str, Any]]]:
    return [[fit(precision, weights, each) for each in ({}, *measures)] for precision, weights, measures in RUNS[runs]]


@pytest.mark.parametrize("runs", [slice(1, 2), pytest.param(slice(None), marks=pytest.mark.acceptance)])
def test_whole_runs_compute_the_same(runs: slice) -> None:
    """In float64, in mixed precision, and without a flush; the self-check runs the measures, too."""
    for found in harness.run(2, fit_all, runs):
        for kept, *others in found:
            assert all(other == kept for other in others)
        assert len({str(kept["losses"]) for kept, *_ in found}) == len(found)
