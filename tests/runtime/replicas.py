"""Replicas of a rank with two stages, without a pipeline around them, and what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_gpp.runtime import GradientSync, Mesh
from lightning_gpp.runtime.sharding import OwnedParameters, ShardedStages, StageSync, assign_owners

NUM_STEPS, NUM_MICRO_BATCHES, MICRO_BATCH = 3, 2, 2
CLIP = 0.7

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=0.1),
    "momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: Adam(groups, lr=0.01),
    "adamw": lambda groups: AdamW(groups, lr=0.01),
}


class First(nn.Module):
    """Sizes that 2 and 3 divide, and that they do not; a number; parameters without a gradient, always or sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 12)
        self.narrow = nn.Linear(12, 1)
        self.scale = Parameter(torch.tensor(1.5))
        self.frozen = Parameter(torch.linspace(0, 1, 5), requires_grad=False)
        self.never = nn.Linear(7, 4)
        self.rare = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] > 10).all()):
            x = self.rare(x)
        return (self.narrow(torch.tanh(self.wide(x * self.frozen))) * self.scale).tanh()


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 6)
        self.outer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))).square().sum()


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(First(), Second()).double()


STAGES = {name: (int(name[0]),) for name, _ in model().named_parameters()}


def micro_batches(rank: int, step: int) -> list[Tensor]:
    """Rank 1 alone uses `rare`, and has one micro-batch less in the last step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = NUM_MICRO_BATCHES - (rank == 1 and step == NUM_STEPS - 1)
    samples = torch.randn(count, MICRO_BATCH, 5, generator=generator, dtype=torch.float64)
    if rank == 1 and step == 1:
        samples[0, :, 0] += 100
    return list(samples)


def grouped(named: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Two groups of parameters with different settings."""
    named = list(named)
    weights = [parameter for name, parameter in named if name.endswith("weight")]
    others = [parameter for name, parameter in named if not name.endswith("weight")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]


def alone(num_replicas: int, optimizer: str, clip: bool) -> dict[str, Tensor]:
    """Parameters after training in one process, on the samples of all replicas."""
    module = model()
    steps = OPTIMIZERS[optimizer](grouped(module.named_parameters()))
    for step in range(NUM_STEPS):
        for rank in range(num_replicas):
            for samples in micro_batches(rank, step):
                module(samples).backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        steps.step()
        steps.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def accumulate(module: nn.Sequential, sync: StageSync, batches: list[Tensor]) -> None:
    """Forwards and backwards of all micro-batches, breadth first, with the calls that a schedule makes."""
    sync.unshard(0)
    sync.ready(0)
    sync.unshard(1)
    between = [module[0](samples) for samples in batches]
    sync.reshard(0)
    sync.ready(1)
    leaves = [output.detach().requires_grad_() for output in between]
    losses = [module[1](leaf) for leaf in leaves]
    sync.unshard(0)
    for _ in _backwards(sync, 1, losses):
        pass
    sync.ready(0)
    pairs = list(zip(between, leaves, strict=True))
    for output, leaf in _backwards(sync, 0, pairs):
        output.backward(leaf.grad)


def _backwards(sync: StageSync, stage: int, work: list[Any]) -> Iterator[Any]:
    if not work:
        sync.arm(stage)
    for number, item in enumerate(work, 1):
        if number == len(work):
            sync.arm(stage)
        if isinstance(item, Tensor):
            item.backward()
        yield item
    sync.reduce(stage)
    sync.reshard(stage)


class Replica:
    """One of the replicas, trained as `kind` says."""

    def __init__(self, kind: str, rank: int, num_replicas: int) -> None:
        self.rank, self.module = rank, model()
        mesh = Mesh(num_replicas, 1, rank)
        parameters = dict(self.module.named_parameters())
        holders = dict.fromkeys(parameters, tuple(range(num_replicas)))
        self.owned: OwnedParameters | None = None
        self.sync: GradientSync | ShardedStages
        if kind == "fsdp":
            self.sync = ShardedStages(self.module, parameters, holders, mesh, stages=STAGES)
        else:
            self.sync = GradientSync(parameters, holders, mesh, stages=STAGES)
        if kind == "zero1":
            self.owned = OwnedParameters(parameters, holders, assign_owners(parameters, holders), mesh)

    def optimizer(self, name: str) -> Optimizer:
        mine = None if self.owned is None else self.owned.owned
        named = [(n, p) for n, p in self.module.named_parameters() if mine is None or n in mine]
        return OPTIMIZERS[name](grouped(named))

    def train(self, optimizer: str, clip: bool) -> Optimizer:
        steps = self.optimizer(optimizer)
        for step in range(NUM_STEPS):
            accumulate(self.module, self.sync, micro_batches(self.rank, step))
            self.sync.sync()
            self.step(steps, clip)
        return steps

    def step(self, optimizer: Optimizer, clip: bool) -> None:
        if clip:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grads_with_norm_(parameters, CLIP, self.sync.grad_norm())
        optimizer.step()
        if self.owned is not None:
            self.owned.publish()
        optimizer.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        """Whole parameters; the module keeps them."""
        if isinstance(self.sync, ShardedStages):
            self.sync.restore()
        return {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], hint: object = "") -> None:
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        scale = theirs[name].abs().max().clamp(min=1e-3)
        assert ((value - theirs[name]).abs().max() / scale).item() <= 1e-12, (name, hint)
