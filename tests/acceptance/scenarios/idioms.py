"""Ways to write networks, optimizers and metrics that researchers use."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torchmetrics import MeanMetric, MetricCollection, MetricTracker, SumMetric

from tests.acceptance.scenarios.base import Chain, Facts, Make, build, family, scenario, staged, validated


class InPlace(Chain):
    """The step changes received values in place, wholly and in parts, reads them again, and hooks their gradients."""

    def loss(self, batch: Any) -> Any:
        hidden = self.first(batch[0])
        hidden += 1
        hidden[:, 0] = hidden[:, 1].detach()
        hidden.view(-1)[::2] += 0.5
        hidden.t()[1].mul_(0.5)
        out = self.last(hidden.tanh_())
        if float(out.detach().norm()) > 0:  # by a value, which no recording takes
            out.mul_(3)
        if self.training:
            assert out.grad_fn is not None
            out.retain_grad()
            out.register_hook(lambda gradient: 2 * gradient)
        return F.mse_loss(out, batch[1]) + hidden.sum(1).square().mean()


class InPlaceModule(Chain):
    """A module changes its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Hypernetwork(Chain):
    """Calls a layer with weights that another one makes."""

    more = ("made",)

    def __init__(self) -> None:
        super().__init__()
        self.made, self.code = nn.Linear(2, 12), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.made(self.code).view(2, 6)}
        return torch.func.functional_call(self.last, weights, (self.first(x).tanh(),))


class Quantizes(Chain):
    """Compares results with the weights of a module, before it calls the module."""

    more = ("codes",)

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, 6)

    def loss(self, batch: Any) -> Any:
        latent = self.first(batch[0])
        nearest = self.codes(torch.cdist(latent, self.codes.weight).argmin(-1))
        out = self.last(latent + (nearest - latent).detach())
        return F.mse_loss(out, batch[1]) + F.mse_loss(nearest, latent.detach())


class Rotates(Chain):
    """Has complex weights, whose gradients are clipped with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first[0].turn = nn.Parameter(torch.polar(torch.ones(4), torch.arange(4.0)).to(torch.complex128))
        self.first[0].register_forward_pre_hook(lambda layer, args: (args[0] * layer.turn.angle().cos(),))


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer without `Optimizer.__init__`, as copied in many repositories."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state, self.count = defaultdict(dict), 0
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss, self.count = self.inner.step(closure), self.count + 1
        for parameter in (each for group in self.param_groups for each in group["params"]):
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            if self.count % 2 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss


class LooksAhead(Chain):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.Adam(self.parameters(), lr=0.05))


class ThroughTwice(Chain):
    """Validates by calls that go through the network twice."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        again = self.first(self(batch[0]).repeat(1, 2))
        self.log("val_loss", self.last(again).sum())


class MovesTarget(Chain):
    """A target on another rank than the step's, which a hook moves between the step and the zeroing of gradients."""

    more = ()

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(4, 6).requires_grad_(False)

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + F.mse_loss(self.first(batch[0]), self.target(batch[0]))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for mean, weight in zip(self.target.parameters(), self.first[0].parameters(), strict=True):
            mean.data.lerp_(weight.data, 0.5)


class KeptMetrics(Chain):
    """Metrics in a tracker, which copies them, in plain containers, made in a hook, copied and pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanMetric().set_dtype(torch.float64), maximize=False)
        self.bundle = (MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}),)
        self.bundle[0].set_dtype(torch.float64)

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()
        self.made = SumMetric().set_dtype(torch.float64)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for metric in (self.tracker, self.made, self.bundle[0]):
            metric.update(loss)

    def on_validation_epoch_end(self) -> None:
        copied, stored = copy.deepcopy(self.made), pickle.loads(pickle.dumps(self.made))
        assert stored.dist_sync_fn is None
        found = [self.tracker.compute(), self.made.compute(), copied.compute(), *self.bundle[0].compute().values()]
        self.seen.append([float(value) for value in found])
        self.bundle[0].reset()


STAGES: dict[type[Chain], dict[str, Any]] = {
    MovesTarget: {"stages": {"first": 1, "target": 1, "last": 0}},
    InPlaceModule: {"stages": {"first": 1, "last.0": 1, "last.1": 1, "last.2": 0, "last.3": 0}},
}


def _trained(make: Make, folder: Path, kind: type[Chain], **gpp: Any) -> Facts:
    return validated(make, build(kind), gradient_clip_val=0.5, gpp={**staged(kind), **STAGES.get(kind, {}), **gpp})


family(
    "idiom",
    _trained,
    {
        kind.__name__: {"kind": kind}
        for kind in (
            *(InPlace, InPlaceModule, Hypernetwork, Quantizes, Rotates, LooksAhead, ThroughTwice, MovesTarget),
            KeptMetrics,
        )
    },
)
family(
    "in_place",
    _trained,
    {
        "recomputed": {"kind": InPlace, "recompute": ["first"]},
        "split": {"kind": InPlace, "schedule": "zb_h1"},
        "whole": {"kind": InPlace, "step": "whole"},
    },
)


@scenario
def pruned_before(make: Make, folder: Path) -> Facts:
    module = build()
    for part, name in ((module.first[0], "weight"), (module.last, "weight"), (module.last, "bias")):
        prune.l1_unstructured(part, name, amount=0.4)
    return validated(make, module)
