"""Modules that cannot be recorded are called whole: they compute the same, and the rest is cut as usual."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_gpp.capture import capture_step
from lightning_gpp.capture.calls import find_calls
from lightning_gpp.errors import CaptureError
from tests.capture import zoo
from tests.capture.zoo import Base, linear
from tests.stages.inprocess import assert_transparent, chain_of


class Experts(nn.Module):
    """Sends each sample to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = linear(8, 2), nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor) -> Tensor:
        scores, out = self.router(x).softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (scores.argmax(-1) == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return out


class Packed(nn.Module):
    """A recurrence over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0] > 0).long().cpu()
        packed = pack_padded_sequence(x.view(-1, 4, 2), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=4)[0].mean(1)


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.first(x)
        if mask is not None and mask.any():
            h = h * mask
        return h if h.abs().mean() < 0.01 else self.second(h)


class Jumps(nn.Module):
    """Draws by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if random.random() < 2.0 else x


class Slopes(nn.Module):
    """Differentiates a layer sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(torch.func.grad(lambda row: self.layer(row).tanh().sum()))(x)


class Chain(Base):
    stages = [["a"], ["middle"], ["b"]]

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x).tanh()))


@pytest.mark.parametrize("kind", [Experts, Packed, EarlyExit, Jumps, Slopes])
def test_the_smallest_module_is_called_whole(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = Chain(kind()).double()
    captured = capture_step(module, zoo.batch())
    assert list(captured.uncut) == ["middle"]
    assert ".py:" in captured.uncut["middle"]
    (operator,) = [operator for operator in captured.graph if operator.module == "middle"]
    assert operator.target == kind.__name__
    assert set(operator.parameters) == {name for name, _ in module.named_parameters() if name.startswith("middle.")}
    assert operator.flops.at(8) > 0
    assert operator.saved_bytes.at(8) > 0 or kind in (Jumps, Slopes)  # keep what is before them, or by unknown means
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


class Nested(nn.Module):
    """Returns a number that its experts computed: only the call around them can be one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()
        self.outer = linear()

    def forward(self, x: Tensor) -> Tensor:
        h, count = self.inner(x)
        return self.outer(h) / (1 + count)


class Counting(EarlyExit):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x), int((x > 0).sum())


def test_a_module_that_returns_a_number_is_called_with_the_one_around_it() -> None:
    torch.manual_seed(0)
    module = Chain(Nested()).double()
    captured = capture_step(module, zoo.batch())
    assert list(captured.uncut) == ["middle"]
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


class KeepingExperts(Experts):
    """Keeps the loss that balances its experts; fake tensors do not get that far."""

    aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = out.square()
        return out


class Balanced(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"]) + self.middle.aux.mean()


def test_a_tensor_that_a_module_keeps_is_no_result() -> None:
    module, cpu = Balanced(KeepingExperts()).double(), torch.device("cpu")
    with pytest.raises(CaptureError, match="the step reads a tensor that a module computed but did not return"):
        capture_step(module, zoo.batch())
    with pytest.raises(CaptureError, match="the step reads a tensor that a module computed but did not return"):
        find_calls(module, zoo.batch(), context=nullcontext, device=cpu, stand_ins=lambda _: {})


class Adds(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.outer = inner, linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)) + self.inner.aux


def test_a_module_that_reads_what_another_one_keeps_is_called_with_it() -> None:
    torch.manual_seed(0)
    module = Chain(Adds(KeepingExperts())).double()
    captured = capture_step(module, zoo.batch())
    assert list(captured.uncut) == ["middle"]
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


class Counter(nn.Module):
    """Counts its calls in an attribute, or deep inside of one, and computes with the number."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layer, self.inside, self.calls = linear(), inside, 0
        self.config = SimpleNamespace(inner={"calls": 0, "act": torch.tanh})

    def forward(self, x: Tensor) -> Tensor:
        x = self.config.inner["act"](self.layer(x))
        if self.inside:
            self.config.inner["calls"] += 1
            return x * self.config.inner["calls"]
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(("inside", "name"), [(False, "calls"), (True, "config.inner.calls")])
def test_a_module_that_counts_its_calls_is_not_cut(inside: bool, name: str) -> None:
    module = Chain(Counter(inside)).double()
    uncut = capture_step(module, zoo.batch()).uncut
    assert list(uncut) == ["middle"]
    assert f"changes 'middle.{name}', which it reads, from call to call" in uncut["middle"]
    assert (module.middle.calls, module.middle.config.inner["calls"]) == (0, 0)


class Keeper(nn.Module):
    """Its list would be that of the capture, if it were cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = linear(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        return torch.tanh(self.layer(x))


def test_a_module_that_appends_to_a_list_is_not_cut() -> None:
    assert "changes 'middle.seen'" in capture_step(Chain(Keeper()).double(), zoo.batch()).uncut["middle"]


class Deciding(nn.Module):
    """Fills in an option of its configuration at its first call, as the classifiers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config = linear(), SimpleNamespace(kind=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind = "relu"
        return self.layer(x).relu() if self.config.kind == "relu" else self.layer(x)


def test_an_option_that_a_module_fills_in_once_is_no_state() -> None:
    module = Chain(Deciding()).double()
    assert capture_step(module, zoo.batch()).uncut == {}
    assert module.middle.config.kind is None


class Everything(Base):
    """All parameters are in the module that cannot be cut."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        del self.a, self.b
        self.net = net or Experts()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch["x"]), batch["y"])


def test_a_model_in_one_piece_is_refused() -> None:
    with pytest.raises(CaptureError, match="test_uncut.py"):
        capture_step(Everything().double(), zoo.batch())


def test_a_model_may_be_frozen_when_it_is_captured() -> None:
    """A callback unfreezes it when training begins."""
    module = Chain(Jumps()).double().requires_grad_(False)
    assert [operator.module for operator in capture_step(module, zoo.batch()).graph][-1] == "@step"


class Forces(nn.Module):
    """Returns an energy's slope, by one of the functions that differentiate."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.first, self.second, self.by = linear(), linear(8, 1), by

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.by == "argument" else x.detach().requires_grad_()
        energy = self.second(self.first(x).tanh()).sum()
        if self.by == "backward":
            energy.backward(inputs=[x], retain_graph=True)
        slope = x.grad if self.by == "backward" else torch.autograd.grad(energy, x, create_graph=True)[0]
        return energy + x * slope


@pytest.mark.parametrize("by", ["argument", "backward"])
def test_a_module_that_differentiates_is_called_whole(by: str) -> None:
    torch.manual_seed(0)
    module = Chain(Forces(by)).double()
    captured = capture_step(module, zoo.batch())
    assert list(captured.uncut) == ["middle"]
    assert "the forward differentiates what it computes (torch.autograd)" in captured.uncut["middle"]
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


class Slope(nn.Module):
    """Differentiates what its caller gives it."""

    def forward(self, energy: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class SlopeOfAnother(Chain):
    """One module differentiates what another one computed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        return self.b(self.middle(self.a(x).tanh(), x)).square().mean()


class Scaled(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, energy: Tensor, x: Tensor) -> Tensor:
        return self.weight * super().forward(energy, x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SlopeOfAnother(Scaled()), "what other modules have computed"),
        (Everything(Forces("detached")), r".*\n.*the forward of a submodule"),
    ],
)
def test_a_graph_of_several_calls_or_of_the_model_is_refused(module: Base, reason: str) -> None:
    with pytest.raises(CaptureError, match=f"forward differentiates .*{reason}"):
        capture_step(module.double(), zoo.batch())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_modules_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"'middle': this is a torch.jit.ScriptModule.*\n.*the nn\.Module"):
        capture_step(Chain(torch.jit.script(linear())).double(), zoo.batch())


class Summing(nn.Module):
    """Sums over ranks between its layers, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        statistics = hidden.detach().mean(0)
        dist.all_reduce(statistics)
        return self.second(hidden - statistics)


class WithSums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.summing, self.head = Summing(), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.summing(batch)).mean()


def test_forwards_that_communicate_are_never_cut(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        captured = capture_step(WithSums(), torch.randn(4, 4))
    finally:
        dist.destroy_process_group()
    assert list(captured.uncut) == ["summing"]
