"""Declared stages run eagerly, with what no capture can see into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpp.errors import CaptureError, PlanError
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.stages import declare
from tests.capture import zoo
from tests.stages.inprocess import split_gradients, whole_gradients


class Peeking(nn.Module):
    """Looks at values: cannot be captured. Returns as many rows as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = self.w(x)
        h = -h if h.sum().item() > 0 else h
        return h, {"norm": h.norm(dim=1, keepdim=True)}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(16, 8)

    def forward(self, left: Tensor, right: Tensor, *, norm: Tensor) -> Tensor:
        return self.w(torch.cat([left, right], dim=1)) * norm


class Towers(zoo.Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Peeking(), nn.Linear(8, 8), Head()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, extra = self.a(x)
        return self.head(left, self.b(y), norm=extra["norm"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["x"] * 2, y=batch["y"]), batch["y"])


ENTRIES: list[dict[str, Any]] = [
    {"name": "head", "modules": ["head"], "inputs": {0: "left.0", 1: "right", "norm": "norm"}},
    {"name": "left", "modules": ["a"], "inputs": ["@x"]},
    {"name": "right", "modules": ["b"], "inputs": ["@y"]},
]


class TowersWithNorm(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, _ = self.a(x)
        return self.head(left, self.b(y), norm=self.norm(left))


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.norm(dim=1, keepdim=True)


def entries() -> list[dict[str, Any]]:
    return [*ENTRIES, {"name": "norm", "modules": ["norm"], "inputs": ["left.0"]}]


def plan_of(declared: Any) -> Plan:
    order = {"left": 3, "right": 2, "norm": 1, "head": 0}
    drafts = [
        Stage(
            name=d.name,
            modules=(d.module, STEP) if d.name == "head" else (d.module,),
            devices=(order[d.name],),
            micro_batch_size=3,
        )
        for d in declared.declarations
    ]
    return make_plan(declared.graph, drafts, batch_size=zoo.B)


def test_declared_stages_equal_the_whole() -> None:
    torch.manual_seed(0)
    module = TowersWithNorm().double()
    declared = declare(module, zoo.batch(), entries(), step="training_step")
    plan = plan_of(declared)
    assert plan.depth == 3
    assert all(edge.dynamic for edge in plan.edges)
    loss, reference = whole_gradients(module, plan, zoo.batch())
    assert split_gradients(module, declared, plan, zoo.batch()) == pytest.approx(loss, rel=1e-12)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"modules": ["nowhere"]}, "there is no module 'nowhere'"),
        ({"inputs": ["missing"]}, "reads 'missing', but there is no such stage"),
        ({"modules": ["a", "b"]}, "exactly one module and its `inputs`"),
        ({"inputs": ["head"]}, "cycle|exactly one stage"),
    ],
)
def test_bad_declarations(change: dict[str, Any], match: str) -> None:
    broken = entries()
    broken[1] = {**broken[1], **change}
    with pytest.raises(PlanError, match=match):
        declare(TowersWithNorm(), zoo.batch(), broken, step="training_step")


def test_an_argument_that_the_step_does_not_pass() -> None:
    module = TowersWithNorm().double()
    broken = entries()
    broken[1] = {**broken[1], "inputs": ["@z"]}
    declared = declare(module, zoo.batch(), broken, step="training_step")
    with pytest.raises(CaptureError, match="every @name must be a tensor argument"):
        split_gradients(module, declared, plan_of(declared), zoo.batch())


def test_a_result_that_is_no_tensor() -> None:
    module = TowersWithNorm().double()
    broken = entries()
    broken[-1] = {**broken[-1], "inputs": ["left"]}
    declared = declare(module, zoo.batch(), broken, step="training_step")
    with pytest.raises(CaptureError, match="Name a part of the result, as in 'left.0'"):
        split_gradients(module, declared, plan_of(declared), zoo.batch())


@pytest.mark.parametrize("reference", ["left.1.nokey", "left.7", "left.nokey"])
def test_a_part_that_the_result_does_not_have(reference: str) -> None:
    module = TowersWithNorm().double()
    broken = entries()
    broken[-1] = {**broken[-1], "inputs": [reference]}
    declared = declare(module, zoo.batch(), broken, step="training_step")
    with pytest.raises(CaptureError, match=f"gives a tuple of 2 items, in which '{reference}' is not a tensor"):
        split_gradients(module, declared, plan_of(declared), zoo.batch())
