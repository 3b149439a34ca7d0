"""What cannot be captured is refused with the user's line, the reason and the ways out; nothing is frozen silently."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpp.capture import capture_step
from lightning_gpp.errors import CaptureError, PlanError, ShapeError
from lightning_gpp.stages import build
from tests.capture import zoo
from tests.capture.zoo import Base
from tests.stages.inprocess import assert_transparent, chain_of, split_gradients


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            h = -h
        return self.b(h)


class Nonzero(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)[x[:, 0].nonzero()[:, 0]])


class Epoch(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * (1 + self.current_epoch))


class EpochWindow(Base):
    """Both runs of the capture see the same branch, other epochs would not."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.relu() if 5 < self.current_epoch < 10 else h)


class BatchSize(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * (1.0 / x.shape[0]))


class LateCall(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.a(batch["x"])
        return self.b(h).mean() if h.sum() > 0 else h.mean()


class GradientHook(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.a(batch["x"])
        h.register_hook(lambda gradient: gradient / 2)
        return self.b(h).mean()


class Hooked(Base):
    """The step reads what a hook keeps; the hook knows the module by a variable of the code around it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.a.register_forward_hook(lambda module, args, result: self.kept.append(result))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.kept.clear()
        return self(batch["x"]).mean() + sum(kept.pow(2).mean() for kept in self.kept)


class SideInput(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.bias = batch["y"]
        return self(batch["x"]).mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + self.bias)


class Logs(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.log("norm", h.norm())
        return self.b(h)


class Region(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda h: self.a(h).tanh() * 2, x, use_reentrant=False))


class EarlyParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["x"] * self.scale).mean()


class Unregistered(Base):
    """A trained tensor that the module does not know as its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.ones(8, requires_grad=True)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.b(self.a(batch["x"]) * self.scales[0]).mean()


class Written(Base):
    """The step changes a buffer that a module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.count.add_(1)
        return self(batch["x"]).mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + self.count)


class Shared(Base):
    """A forward changes a buffer in one of its parts that another one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.a, self.b = Tracking(self.mean), Centred(self.mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Tracking(nn.Linear):
    def __init__(self, mean: Tensor) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.mean.lerp_(h.detach().mean(0), 0.1)
        return h


class Centred(Tracking):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x - self.mean, self.weight)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        return x * factor.value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Fresh(Base):
    """An object that every call makes anew is no value that stages could keep."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Scale.apply(self.a(x), SimpleNamespace(value=2.0, of=object())))


class NumpyInStep(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.b(self.a(batch["x"]) * float(np.random.rand())).mean()


class NoNetwork(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.linear(batch["x"], self.a.weight).mean()


class Penalty(Base):
    """A gradient penalty of the step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()


class Fills(Base):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        batch["hidden"] = self.a(batch["x"])
        return self.b(batch["hidden"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch).mean()


class MadeBuffer(Base):
    """A table that the first call makes, and longer sequences make anew."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(x.shape[1]))
        return self.b(self.a(x * self.table))


REFUSED = [
    (Penalty, "differentiates its network"),
    (Branches, "bool` reads the value of a tensor inside a module"),
    (Nonzero, "DynamicOutputShapeException|depends on"),
    (Epoch, "depends on `batch_idx`, `current_epoch`, `global_step`, "),
    (EpochWindow, "`current_epoch` is read in a forward that is cut"),
    (BatchSize, "depends on the number of samples in the batch"),
    (GradientHook, "calls `register_hook` on a tensor, and 'b' after it"),
    (LateCall, "reads a value that the network computed, and calls 'b' after it"),
    (Hooked, "a module computed but did not return"),
    (SideInput, "did not pass to the module's call"),
    (Logs, "a forward that is cut into stages logs a value"),
    (Region, "activation checkpointing spans more than one module call"),
    (EarlyParameter, "uses a parameter before its first module call"),
    (Unregistered, "is no parameter of the module"),
    (Written, "changes 'count', which a module reads, and would do so once per micro-batch"),
    (Fresh, "takes an object that every run creates anew"),
    (NumpyInStep, "depends on .*random numbers of Python or NumPy"),
    (NoNetwork, "calls no submodule that has parameters"),
    (Fills, "writes into a dictionary, list or object that it gets"),
    (MadeBuffer, "the buffer 'table' is made, or gets another shape"),
    (zoo.LateAttribute, "captured at set-up, before hooks such as on_train_start"),
]


class Replaces(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.b.weight = nn.Parameter(self.b.weight.detach().clone())
        return self.b(self.a(batch["x"])).mean()


def test_a_step_that_replaces_a_parameter_is_refused() -> None:
    with pytest.raises(CaptureError, match="training_step: the parameter 'b.weight' is made or replaced.*\n.*__init__"):
        capture_step(Replaces().double(), zoo.batch())


class NoLoss(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.b(self.a(batch["x"]))


def test_a_step_without_a_loss_says_what_to_return() -> None:
    with pytest.raises(CaptureError, match=r"returned None instead of a loss.*on_nonfinite=.?skip"):
        _split(NoLoss)


def _split(kind: type[Base]) -> None:
    module = kind().double()
    captured = capture_step(module, zoo.batch())
    build(captured, chain_of(captured, kind.stages), module)


@pytest.mark.parametrize(("kind", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused_with_line_reason_and_way_out(kind: type[Base], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        _split(kind)
    text = str(caught.value)
    assert "Way out: " in text
    if kind is not NoNetwork:
        assert ".py:" in text.partition(": ")[0]


@pytest.mark.parametrize("kind", [EpochWindow, Logs])
def test_whole_modules_may_read_what_they_like(kind: type[Base]) -> None:
    """The same code inside a module that is not cut runs as Python; only values that would be frozen are refused."""
    module = kind().double()
    captured = capture_step(module, zoo.batch())
    build(captured, chain_of(captured, [[""]]), module)


class Scaled(Base):
    factor = 2.0

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.b(self.a(x) * factor)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["x"], self.factor).mean()


class Prior(Scaled):
    factor: Any = None

    def forward(self, x: Tensor, factor: Any) -> Tensor:
        h = self.a(x)
        return self.b(h if factor is None else h * factor)


@pytest.mark.parametrize(
    ("kind", "changed", "told"),
    [
        (Scaled, 3.0, "an argument was 2.0 when the step was captured and is 3.0 now"),
        (
            *(Prior, torch.ones((), dtype=torch.float64)),
            "(?s)was None when the step was captured and is a tensor now.*strategy.step=whole",
        ),
    ],
)
def test_an_argument_that_changed_is_noticed(kind: type[Scaled], changed: Any, told: str) -> None:
    module = kind().double()
    module.log = lambda *_: None
    captured = capture_step(module, zoo.batch())
    plan = chain_of(captured, module.stages)
    split_gradients(module, captured, plan, zoo.batch())
    module.factor = changed
    with pytest.raises(CaptureError, match=told):
        split_gradients(module, captured, plan, zoo.batch())


def test_another_shape_is_noticed() -> None:
    module = zoo.SharedMask().double()
    captured = capture_step(module, zoo.batch())
    plan = chain_of(captured, module.stages)
    batch: dict[str, Any] = zoo.batch()
    batch["mask"] = batch["mask"][:, :1]
    with pytest.raises(ShapeError, match=r"has shape \(2, 1\) .* the captured batch had \('b', '8'\)"):
        split_gradients(module, captured, plan, batch)


def test_a_buffer_that_stages_on_two_devices_share_and_change() -> None:
    module = Shared().double()
    captured = capture_step(module, zoo.batch())
    with pytest.raises(PlanError, match=r"changes 'mean' in place, and the stages .*a copy of its own. Put"):
        build(captured, chain_of(captured, module.stages), module)


class Window(Base):
    """Between its module calls the step decides by a run-time value that no capture has seen change."""

    window = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.a(batch["x"])
        return self.b(h.relu() if self.window else h).mean()


class AsksForGradients(Base):
    """Decides by what training is, between its module calls, where stages' values have no memory."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.a(batch["x"])
        return self.b(h.tanh() if h.requires_grad and torch.is_grad_enabled() else h).mean()


def test_values_between_module_calls_need_gradients() -> None:
    module = AsksForGradients().double()
    captured = capture_step(module, zoo.batch())
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


def test_a_decision_between_module_calls_is_noticed() -> None:
    module = Window().double()
    captured = capture_step(module, zoo.batch())
    plan = chain_of(captured, module.stages)
    split_gradients(module, captured, plan, zoo.batch())
    module.window = True
    with pytest.raises(CaptureError, match=r"the step called \[\] when it was captured, and \['relu'\] now"):
        split_gradients(module, captured, plan, zoo.batch())
