"""Training in stages without Lightning: a plain loop over a model of two branches.

    torchrun --nproc-per-node 2 -m gpp_examples.plain_loop

Every process runs the same loop. The first one loads the data and computes the loss; both hold a part of the model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp import Options, initialize

Batch = tuple[Tensor, Tensor, Tensor]


class Branches(nn.Module):
    """Two branches that do not depend on each other, and a head that joins them: logits `[batch, 3]`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Linear(2 * width, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(a), self.right(b)], dim=1))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    a, b, labels = batch
    return nn.functional.cross_entropy(model(a, b), labels)


def batches(count: int = 20, size: int = 32) -> list[Batch]:
    """Points labelled with the largest of three sums."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(count, size, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    labels = torch.stack([a[..., 0] + b[..., 0], a[..., 1] + b[..., 1], a[..., 2] + b[..., 2]]).argmax(0)
    return list(zip(a, b, labels, strict=True))


def train(data: list[Batch]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the trained weights on rank 0."""
    torch.manual_seed(1)
    model = Branches().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = Options(stages={"left": 0, "right": 1, "head": 1}, num_micro_batches=4)
    losses = []
    with initialize(model, optimizer, data[0], step=loss_of, options=options) as engine:
        for batch in data:
            losses.append(float(engine.train_step(batch)))
            engine.clip_grad_norm(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights = engine.state_dict()
    return losses, weights


def main() -> None:
    dist.init_process_group("gloo")
    losses, _ = train(batches())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
