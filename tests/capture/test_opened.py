"""Forwards that run as parts of the step, steps that are recorded up to where their modules end, and arguments that
nothing reads: what cannot be recorded around the network does not keep it from being cut.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from lightning_gpp.errors import CaptureError
from tests.capture import zoo
from tests.capture.zoo import Base, linear
from tests.stages.inprocess import assert_transparent, chain_of


class Inner(nn.Module):
    """All parameters of the model, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.b(self.a(x).tanh()), y)

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        rows = (y[:, 0] > -9).nonzero()[:, 0]
        return F.mse_loss(out[rows], y[rows])


class ChecksFirst(Inner):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.abs().max() > 9:
            raise ValueError("too large")
        if not x.isfinite().all():
            raise ValueError("not finite")
        return super().forward(x, y)


class Asserts(Inner):
    """An assertion on a tensor decides nothing."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch._check_tensor_all(x.isfinite(), lambda: "not finite")
        return F.mse_loss(self.b(self.a(x).tanh()), y)


class Wrapped(Base):
    stages = [["net.a"], ["net.b"]]

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        del self.a, self.b
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["x"], batch["y"])


@pytest.mark.parametrize("kind", [Inner, ChecksFirst])
def test_a_forward_around_all_parameters_runs_as_a_part_of_the_step(kind: type[Inner]) -> None:
    torch.manual_seed(0)
    module = Wrapped(kind()).double()
    captured = capture_step(module, zoo.batch())
    assert "net" in captured.opened
    assert any("The forward of 'net' runs as a part of the step" in note for note in captured.notes)
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


class Masked(Inner):
    """Passes a mask only where it hides something."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = None if (y < 9).all() else y < 9
        return self.loss(self.b(self.a(x), hidden), y)


class Hides(nn.Linear):
    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return super().forward(x if hidden is None else x.where(hidden, 0.0))


def test_a_forward_that_decides_by_values_is_not_told_to_run_as_a_whole() -> None:
    """As a whole its call would be refused for the same values."""
    module = Wrapped(Masked())
    module.net.b = Hides(module.net.b.in_features, module.net.b.out_features)
    module, batch = module.double(), zoo.batch()
    captured = capture_step(module, batch)
    with pytest.raises(CaptureError, match="an argument was None .* a tensor now") as refused:
        assert_transparent(module, captured, chain_of(captured, module.stages), {**batch, "y": batch["y"] + 99.0})
    assert "a mask that hides nothing" in str(refused.value)
    assert "step=whole" not in str(refused.value)


class Criterion(nn.Module):
    """A loss with weights, which goes through the samples one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 8))

    def forward(self, out: Tensor, targets: list[Tensor]) -> Tensor:
        losses = [(self.weight * o)[: len(t)] - t for o, t in zip(out, targets, strict=True)]
        return torch.stack([loss.square().mean() for loss in losses]).mean()


class Judged(Base):
    stages = [["a"], ["b"]]

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Criterion()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self.b(self.a(batch["x"]).tanh()), batch["y"])


def test_so_does_a_loss_with_buffers() -> None:
    torch.manual_seed(0)
    module = Judged().double()
    batch = zoo.batch()
    batch["y"] = [row[: 1 + number % 3] for number, row in enumerate(batch["y"])]
    captured = capture_step(module, batch)
    assert captured.opened.keys() == {"criterion"}
    assert_transparent(module, captured, chain_of(captured, module.stages), batch)


class Ends(Base):
    """Selects rows by their values, and calls its last module for these."""

    stages = [["a"], ["b"]]

    def __init__(self) -> None:
        super().__init__()
        self.head = linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.b(self.a(batch["x"]).tanh())
        rows = (batch["y"][:, 0] > -9).nonzero()[:, 0]
        return self.head(h[rows]).square().mean()


def test_modules_behind_the_end_of_the_recording_run_with_the_step() -> None:
    torch.manual_seed(0)
    module = Ends().double()
    captured = capture_step(module, zoo.batch())
    assert set(captured.graph["step"].parameters) == {"head.weight", "head.bias"}
    assert any("The rest runs on its device, with head.bias, head.weight" in note for note in captured.notes)
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


class ByShape(nn.Module):
    """Reads no more than the shape of its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * mask.shape[1]


class Unread(Base):
    stages = [["a"], ["b"]]

    def __init__(self) -> None:
        super().__init__()
        self.b = ByShape()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(self.a(x), mask.cumsum(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["x"], batch["mask"]).square().mean()


class Written(Base):
    """Between its module calls the step writes results into a tensor, and asks for their device."""

    stages = [["a"], ["b"]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        h = torch.zeros_like(x)
        h[:, :4] = self.a(x)[:, :4]
        return F.mse_loss(self.b(h + torch.ones(1, 8, device=h.device, dtype=h.dtype)), batch["y"])


@pytest.mark.parametrize("kind", [Unread, Written])
def test_what_happens_between_modules(kind: type[Base]) -> None:
    torch.manual_seed(0)
    module = kind().double()
    captured = capture_step(module, zoo.batch())
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


@functools.lru_cache
def _positions(length: int) -> Tensor:
    return torch.arange(length) / length


class Cached(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + _positions(x.shape[1]))


def test_caches_keep_no_fake_tensors() -> None:
    torch.manual_seed(0)
    _positions.cache_clear()
    module = Cached().double()
    captured = capture_step(module, zoo.batch())
    assert _positions(8).sum().item() == 3.5
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


def test_a_forward_with_an_assertion_on_a_tensor_is_cut() -> None:
    torch.manual_seed(0)
    module = Wrapped(Asserts()).double()
    captured = capture_step(module, zoo.batch())
    assert not captured.uncut
    assert not captured.opened
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())
