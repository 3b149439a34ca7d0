"""What forwards derive from weights follows the weights until the backward, as in a simulation in plain loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality.one_device import on_one_device
from lightning_gpp.plan import Plan
from lightning_gpp.runtime import LOSS, MicroBatch
from lightning_gpp.schedules.continuous import continuous_program
from tests.runtime.asynchronous import AsyncCase, Run
from tests.runtime.stages import Mixer, make_data
from tests.strategies import plan_of

CHAIN = plan_of([(0, 1), (1, 2)], [1, 1, 1], 1, data=True)
NUMBER = 6
LR = 0.05

Derive = Callable[[Tensor], Tensor]

KINDS: dict[str, Derive] = {
    "the weight itself": lambda weight: weight,
    "a view": lambda weight: weight.t().t(),
    "a cast": lambda weight: weight.float().double(),
    "a cast of a view": lambda weight: torch.cat([part.float() for part in weight.split([1, 2])]).double(),
    "a norm": lambda weight: weight / weight.norm(),
    "changed in place": lambda weight: weight.clone().mul_(2).add_(weight.exp()),
}


class Deriving(Mixer):
    """Computes with something derived from its weight, or with a tensor that is given instead."""

    def __init__(self, plan: Plan, index: int, derive: Derive, given: Tensor | None = None) -> None:
        super().__init__(plan, index)
        self.derive, self.given = derive, given

    def mixing(self) -> Tensor:
        return self.derive(self.weight) if self.given is None else self.given


class Simulation:
    """A chain of stages with one sample per mini-batch and plain SGD, whose stage i is 2 - i updates late.

    The gradient of a backward is that of the derived tensor as a leaf, with the values of the backward's weights, and
    then that of its derivation.
    """

    def __init__(self, derive: Derive, decay: float) -> None:
        self.derive, self.decay = derive, decay
        first = [Mixer(CHAIN, index) for index in range(3)]
        self.weights = [[{n: p.detach().clone() for n, p in stage.named_parameters()}] for stage in first]
        self.velocities: list[list[dict[str, Tensor]]] = [[{}] for _ in first]
        self.forward, self.backward = cache(self._forward), cache(self._backward)

    def run(self) -> dict[str, Tensor]:
        for batch in range(NUMBER):
            for index in range(3):
                self._update(index, batch)
        return {f"stage{i}.{name}": value for i in range(3) for name, value in self.weights[i][NUMBER].items()}

    def _forward(self, index: int, batch: int) -> tuple[Deriving, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        weights = self.weights[index][max(batch - (2 - index), 0)]
        leaf = self.derive(weights["weight"]).detach().clone().requires_grad_()
        stage = Deriving(CHAIN, index, self.derive, leaf)
        stage.load_state_dict(weights)
        whole = MicroBatch(0, 0, 1, 1)
        data = make_data(1, seed=batch).inputs(whole)
        given = self.forward(index - 1, batch)[3] if index else data
        inputs = {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in given.items()}
        return stage, leaf, inputs, stage(inputs, whole)

    def _backward(self, index: int, batch: int) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """The gradients of the weights, and of the inputs."""
        stage, leaf, inputs, outputs = self.forward(index, batch)
        received = {LOSS: torch.ones_like(outputs[LOSS])} if index == 2 else self.backward(index + 1, batch)[1]
        weights = self._corrected(index, batch)
        stage.load_state_dict(weights)
        leaf.data.copy_(self.derive(weights["weight"]))
        names = [name for name, gradient in received.items() if gradient is not None]
        torch.autograd.backward([outputs[name] for name in names], [received[name] for name in names])
        weight = weights["weight"].clone().requires_grad_()
        (of_weight,) = torch.autograd.grad(self.derive(weight), weight, leaf.grad)
        gradients = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
        return {**gradients, "weight": of_weight}, {name: value.grad for name, value in inputs.items()}

    def _corrected(self, index: int, batch: int) -> dict[str, Tensor]:
        late, velocity = min(2 - index, batch), self.velocities[index][batch]
        return {name: w - late * velocity.get(name, 0.0) for name, w in self.weights[index][batch].items()}

    def _update(self, index: int, batch: int) -> None:
        gradients, old = self.backward(index, batch)[0], self.weights[index][batch]
        new = {name: value - LR * gradients.get(name, torch.zeros_like(value)) for name, value in old.items()}
        velocity, late = dict(self.velocities[index][batch]), min(2 - index, batch)
        if self.decay and late:
            gamma = self.decay ** (1 / late)
            velocity = {n: gamma * velocity.get(n, 0.0) + (1 - gamma) * (new[n] - old[n]) for n in new}
        self.weights[index].append(new)
        self.velocities[index].append(velocity)


def trained(derive: Derive, policy: str, options: dict[str, Any]) -> dict[str, Tensor]:
    program = on_one_device(continuous_program(CHAIN))
    stages = [Deriving(program.plan, index, derive) for index in range(3)]
    case = AsyncCase(plan=CHAIN, policy=policy, options=options, optimizer="sgd", segments=(NUMBER,))
    run = Run(case, program, 0, stages, [0])
    run.add(0)
    return run.train(lambda: None).weights


@pytest.mark.parametrize("kind", KINDS)
def test_backwards_see_the_weights_that_a_policy_writes(kind: str) -> None:
    for policy, options, decay in (
        ("latest", {}, 0.0),
        ("corrected", {"rescale_steps": 0, "discrepancy_decay": 0.3}, 0.3),
    ):
        found, expected = trained(KINDS[kind], policy, options), Simulation(KINDS[kind], decay).run()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=f"{policy}: {name}")
