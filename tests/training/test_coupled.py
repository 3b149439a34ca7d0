"""Optimizers that combine parameters in their step are found by a trial on small tensors, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from lightning_gpp.errors import ConfigError
from lightning_gpp.training.coupled import check_separable
from lightning_gpp.training.optimizers import OptimizerIndex

COUPLED = r"returned \w+, which combines parameters inside of its step.*strategy.grad_norm\(\)"


class NormalisedSGD(SGD):
    """Divides gradients by the norm of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        given = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in given]).norm()
        for each in given:
            each.add_(each.grad / norm, alpha=-0.05)
        return loss


class Clipping(Adam):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 100.0)
        return super().step(closure)


class Estimating(Optimizer):
    """Estimates the distance to the solution by sums over all parameters, as Prodigy and D-Adaptation do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": 1e-6, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        first, total = self.param_groups[0], 0.0
        numerator = first["numerator"]
        for parameter in (each for group in self.param_groups for each in group["params"]):
            state = self.state[parameter]
            start = state.setdefault("start", parameter.clone())
            state["sum"] = state.get("sum", 0.0) + first["d"] * parameter.grad
            numerator += first["d"] * float((parameter.grad * (start - parameter)).sum())
            total += float(state["sum"].abs().sum())
        distance = max(first["d"], numerator / total)
        for group in self.param_groups:
            group |= {"d": distance, "numerator": numerator}
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] * distance)


class TrustRatio(AdamW):
    """Scales the update of every parameter by its norm, and counts steps in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = [each.clone() for group in self.param_groups for each in group["params"]]
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        for start, now in zip(before, (e for group in self.param_groups for e in group["params"]), strict=True):
            now.copy_(start + (now - start) * start.norm())


class Langevin(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


class Evaluating(SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Watching(SGD):
    """Keeps an object that a copy cannot share."""

    def __init__(self, parameters: Any, module: nn.Module) -> None:
        super().__init__(parameters, lr=0.1)
        self.module = module


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 300), nn.LayerNorm(300), nn.Linear(300, 4))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    return [{"params": matrices}, {"params": [each for each in module.parameters() if each.ndim < 2]}]


def try_out(make: Callable[[nn.Module], Optimizer]) -> None:
    """Try an optimizer, whose parameters, state, groups, hooks and random streams are as before."""
    module = net()
    optimizer = make(module)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the user's ran"))
    LambdaLR(optimizer, lambda step: 0.0)  # a warm-up that begins at zero
    names, tensors = [name for name, _ in module.named_parameters()], [each.clone() for each in module.parameters()]
    before, stream = str(optimizer.state_dict()), torch.get_rng_state()
    try:
        check_separable(OptimizerIndex(optimizer, module), [set(names[:3]), set(names[3:])])
    finally:
        assert str(optimizer.state_dict()) == before
        assert torch.equal(torch.get_rng_state(), stream)
        assert all(torch.equal(now, then) for now, then in zip(module.parameters(), tensors, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda module: NormalisedSGD(groups(module), lr=0.1),
        lambda module: NormalisedSGD(module.parameters(), lr=0.1),
        lambda module: Clipping(groups(module), lr=0.1),
        lambda module: Estimating(groups(module)),
    ],
)
def test_combined_parameters_are_refused(make: Callable[[nn.Module], Optimizer]) -> None:
    with pytest.raises(ConfigError, match=COUPLED):
        try_out(make)


@pytest.mark.parametrize(
    "make",
    [
        lambda module: type("Own", (RMSprop,), {})(groups(module), lr=0.1, momentum=0.9),
        lambda module: type("Own", (Adam,), {})(groups(module), lr=torch.tensor(0.1)),
        lambda module: TrustRatio(groups(module), lr=0.1),
        lambda module: Langevin(groups(module), lr=0.1),
        lambda module: Evaluating(groups(module), lr=0.1),
        lambda module: Watching(groups(module), module),
    ],
)
def test_others_are_not(make: Callable[[nn.Module], Optimizer]) -> None:
    try_out(make)


def test_parameters_of_one_device_may_meet() -> None:
    module = net()
    names = [name for name, _ in module.named_parameters()]
    trained: list[Tensor] = list(module[3].parameters())  # type: ignore[index]
    check_separable(OptimizerIndex(NormalisedSGD(trained, lr=0.1), module), [set(names[:3]), set(names[3:])])
