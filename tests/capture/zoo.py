"""Small LightningModules, each with one thing that a capture can get wrong, and stages that cut through it."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

B = 6


def linear(n: int = 8, m: int = 8) -> nn.Linear:
    return nn.Linear(n, m)


class Base(L.LightningModule):
    """Two layers and a mean-squared loss; subclasses change one thing."""

    stages = [["a"], ["b"]]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss


class Glue(Base):
    """Residuals, reshapes and sizes that depend on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = (h + x).view(x.shape[0], 2, 4).transpose(1, 2).reshape(x.size(0), -1)
        return self.b(h) + h * (1 / 3) + torch.arange(x.shape[0], device=x.device)[:, None] * 0.0


class InPlace(Base):
    """In-place operations right behind and in front of the cut, and on a view."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        r = h * 2
        h.add_(1.0)
        h[:, :4] += 1.0
        out = self.b(h)
        out += r
        out[:, 0] = r[:, 1]
        return out


class SharedMask(Base):
    """An integer input that every stage reads."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        keep = mask.bool().logical_not()
        h = self.a(x).masked_fill(keep, 0.0)
        return self.b(h).masked_fill(keep, 0.0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["x"], mask=batch["mask"]), batch["y"])


class Tied(Base):
    """One weight in two stages, once as a module's and once in a function."""

    stages = [["a"], ["b"], ["c"]]

    def __init__(self) -> None:
        super().__init__()
        self.c = linear()
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))) + F.linear(x, self.b.weight)


class BatchNorm(Base):
    """Running statistics in both stages."""

    stages = [["a", "n"], ["b", "m"]]

    def __init__(self) -> None:
        super().__init__()
        self.n, self.m = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(self.b(self.n(self.a(x)).relu()))


class RootBuffer(Base):
    """A buffer of the root that its forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.seen.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.b(h)


class Triple(torch.autograd.Function):
    """A gradient that autograd would not find by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class CustomFunction(Base):
    """A custom autograd function in a forward that is cut."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Triple.apply(self.a(x)))


class Checkpointed(Base):
    """Activation checkpointing of whole modules in a forward that is cut."""

    stages = [["a"], ["b"], ["c"]]

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Sequential(linear(), nn.Tanh(), linear())
        self.runs = 0
        self.c.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.runs += 1

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.b, self.a(x), use_reentrant=True)
        return checkpoint(self.c, h, use_reentrant=False)


class Hooks(Base):
    """Forward hooks that change arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda m, args, out: out * 2)
        self.b.register_forward_pre_hook(lambda m, args: (args[0] + 1,))


class SeveralCalls(Base):
    """The step calls towers and head itself, with operators between the calls that read the batch."""

    stages = [["a"], ["b"], ["c"]]

    def __init__(self) -> None:
        super().__init__()
        self.c = linear(16, 8)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        left = self.a(batch["x"] * 2)
        right = self.b(batch["y"])
        left = left * batch["mask"][:, :8].to(left.dtype) / 2
        out = self.c(torch.cat([left, right.relu()], dim=1))
        return F.mse_loss(out, batch["y"]) + 0.1 * right.pow(2).mean()


class RandomInputs(Base):
    """The step draws noise that both the network and the loss read."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noise = torch.rand(1) * torch.randn_like(batch["x"])
        return F.mse_loss(self(batch["x"] + noise), noise)


class ReadsValues(Base):
    """The step reads values after its network call, keeps metrics, branches on Python's run-time values."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.seen: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        out = self(batch["x"])
        loss = F.mse_loss(out, batch["y"]) * (1 if batch_idx < 5 else 2)
        self.metric(out.detach().mean())
        self.seen.append(loss.item())
        if loss > 1e9:
            raise ValueError("unreachable")
        return {"loss": loss, "out": out.detach()}


class LogitScale(Base):
    """A parameter of the LightningModule itself that only the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["x"]) * self.scale.exp(), batch["y"])


class LateAttribute(Base):
    """Reads what on_train_start would have made."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["x"] * self.made_later), batch["y"])


class Keeps(Base):
    """The step keeps a result in a list, and reads it in no call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.c = linear()
        self.kept: list[Tensor] = []

    stages = [["a"], ["b"], ["c"]]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self(batch["x"])
        self.kept.append(self.c(batch["y"]))
        return F.mse_loss(out, batch["y"])


@dataclasses.dataclass
class Output:
    """Not known to pytree."""

    first: Tensor
    rest: dict[str, Any]


class Structures(Base):
    """Nested inputs and outputs: dicts, None, dataclasses, lists, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Inner(), Inner()

    def forward(self, x: Tensor) -> Output:
        out = self.a({"x": x, "n": None}, scale=2)
        return self.b({"x": out.rest["list"][0], "n": out.first}, scale=3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self(batch["x"])
        return F.mse_loss(out.first, batch["y"]) + out.rest["list"][1].mean()


class Inner(nn.Module):
    """Takes and gives structures."""

    def __init__(self) -> None:
        super().__init__()
        self.w = linear()

    def forward(self, inputs: dict[str, Any], scale: int = 1) -> Output:
        h = self.w(inputs["x"]) * scale
        h = h if inputs["n"] is None else h + inputs["n"]
        return Output(first=h, rest={"list": [h.tanh(), h * 2], "none": None, "count": 3})


class Frozen(Base):
    """A part without gradients, under no_grad and with requires_grad off."""

    stages = [["a"], ["b"], ["c"]]

    def __init__(self) -> None:
        super().__init__()
        self.c = linear()
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            g = self.b(h)
        return self.c(h + g)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])


class Autocast(Base):
    """A part in lower precision, by its own context."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.linear(self.a(x), self.b.weight)
        with contextlib.suppress(ValueError):
            h = h.double()
        return self.b(h)


class Recurrent(Base):
    """An LSTM in one stage, attention in the other."""

    stages = [["rnn"], ["attention", "b"]]

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x[:, None, :].expand(-1, 3, -1))
        h, _ = self.attention(h, h, h, need_weights=False)
        return self.b(h[:, -1])


WORKING = [
    Base,
    Glue,
    InPlace,
    SharedMask,
    Tied,
    BatchNorm,
    RootBuffer,
    CustomFunction,
    Checkpointed,
    Hooks,
    SeveralCalls,
    ReadsValues,
    LogitScale,
    Structures,
    Frozen,
    Autocast,
    Recurrent,
]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, B, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "y": y, "mask": torch.randint(0, 2, (B, 8), generator=generator)}
