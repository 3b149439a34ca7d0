"""Forwards that are cut decide by the values of training, where these are known; others are not cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_gpp._compat.torch import FakeTensor
from lightning_gpp.capture import capture_step
from tests.capture import zoo
from tests.capture.test_attention import Attention
from tests.capture.zoo import Base
from tests.stages.inprocess import assert_transparent, chain_of, split_gradients


class Decides(Base):
    """Computes nothing if a decision is another one than in training."""

    def decision(self, x: Tensor) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h) if self.decision(h) else h * 0 + self.b(h * 0)


class ByPositions(Decides):
    def decision(self, x: Tensor) -> bool:
        positions = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        return bool((positions.diff() == 1).all()) and not isinstance(positions, FakeTensor)


class ByShape(Decides):
    def decision(self, x: Tensor) -> bool:
        return len(torch.eye(3).nonzero()) == 3 and len(torch.arange(7).unique()) == 7


class ByWrittenNumbers(Decides):
    def decision(self, x: Tensor) -> bool:
        mask = torch.zeros(4, 4, dtype=torch.bool)
        mask[:2].fill_(True)
        return mask.any() and not mask.all() and bool(mask[0].all())


class ByTracing(Decides):
    def decision(self, x: Tensor) -> bool:
        traced = torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing()
        return not (traced or x.is_meta)


class Accumulates(Base):
    """Writes results into a tensor of zeros, through views."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.a(x).tanh(), torch.zeros(x.shape, dtype=x.dtype)
        out[:, 2:] = h[:, 2:]
        row = out.unsqueeze_(1).squeeze_(1)[:, 0]
        row += h[:, 1]
        out[:, 1].copy_(row * 2)
        return self.b(out.index_add(1, torch.arange(2), h[:, :2])) + out


@pytest.mark.parametrize("kind", [ByPositions, ByShape, ByWrittenNumbers, ByTracing, Accumulates])
def test_known_values(kind: type[Base]) -> None:
    torch.manual_seed(0)
    module = kind().double()
    captured = capture_step(module, zoo.batch())
    assert not captured.uncut
    assert not captured.opened
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


class Inner(nn.Module):
    """Writes what it does not know into a tensor of zeros, and reads that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = zoo.linear()

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.zeros(8, dtype=torch.bool)
        first = seen[:1]
        first |= x.sum() > -1e9
        return self.layer(x) if seen.any() else x


class Reads(Base):
    stages = [["a"], ["inner"], ["b"]]

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.inner(self.a(x).tanh()))


def test_values_are_unknown_after_unknown_ones_were_written() -> None:
    torch.manual_seed(0)
    module = Reads().double()
    captured = capture_step(module, zoo.batch())
    assert list(captured.uncut) == ["inner"]
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())


class Encoder(Base):
    """torch.nn compares the mask with a causal one."""

    stages = [["a", "encoder.layers.0"], ["encoder.layers.1", "b"]]

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)[:, None].expand(-1, 4, -1)
        mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
        return self.b(self.encoder(h, mask)[:, -1])


def test_a_causal_mask_is_recognised() -> None:
    torch.manual_seed(0)
    module = Encoder().double()
    captured = capture_step(module, zoo.batch())
    assert not captured.uncut
    plan = chain_of(captured, module.stages, zoo.B)
    assert_transparent(module, captured, plan, zoo.batch())
    with Attention() as alone:
        module.training_step(zoo.batch(), 0)
    with Attention() as piped:
        split_gradients(module, captured, plan, zoo.batch())
    assert piped.calls == alone.calls
    assert all(causal for _, (causal, _), _ in alone.calls)


class Chooses(Base):
    """Computes in the kernels that its forward allows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Attends()

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.b(self.a(x))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.flash = zoo.linear(), set[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.flash.add(torch.backends.cuda.flash_sdp_enabled())
        return self.layer(x)


def test_kernels_that_a_forward_allows() -> None:
    module = Chooses().double()
    captured = capture_step(module, zoo.batch())
    module.a.flash.clear()
    assert_transparent(module, captured, chain_of(captured, module.stages), zoo.batch())
    assert module.a.flash == {False}
