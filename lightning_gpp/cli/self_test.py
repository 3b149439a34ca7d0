"""A self-test on the processes of a job: a tiny network trained in stages on all of them, and in one process."""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp.training.loop import initialize
from lightning_gpp.training.options import Options

WIDTH: Final = 8
MOST_DEVICES: Final = 16


class _Network(nn.Module):
    """Two branches of layers, one layer for each device but the first, and a head on that."""

    def __init__(self, num_devices: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(1, num_devices)]
        self.branches = nn.ModuleList(nn.Sequential(*layers[branch::2]) for branch in range(2))
        self.head = nn.Linear(2 * WIDTH, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        joined = torch.cat([branch(batch) for branch in self.branches], dim=1)
        return self.head(joined).square().mean()  # type: ignore[no-any-return]


def self_test(device: torch.device) -> float:
    """Train for three steps on all ranks, which call it together: a stage on each device of up to 16, in pipelines.

    Returns the largest difference of a parameter to the same steps in one process; zero on other ranks than 0.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    number = max(number for number in range(1, MOST_DEVICES + 1) if size % number == 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = _Network(number).double()
        batches = torch.randn(3, size // number, 8, WIDTH, dtype=torch.float64).to(device)
    alone = copy.deepcopy(module).to(device)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (module, alone))
    stages: list[Any] = [{"modules": [f"branches.{k % 2}.{k // 2}"], "devices": [k + 1]} for k in range(number - 1)]
    stages += [{"modules": ["head", "@step"], "devices": [0]}]
    options = Options(stages=stages, num_micro_batches=4, num_pipelines=size // number)
    with initialize(module, optimizer, batches[0, 0], options=options, device=device) as engine:
        for batch in batches:
            engine.train_step(batch[rank // number])
            optimizer.step()
            optimizer.zero_grad()
    for batch in batches if rank == 0 else ():
        alone.training_step(batch.flatten(0, 1)).backward()
        other.step()
        other.zero_grad()
    pairs = zip(module.parameters(), alone.parameters(), strict=True) if rank == 0 else ()
    return max((float((ours.to(theirs) - theirs).abs().max().detach()) for ours, theirs in pairs), default=0.0)
