"""Training in stages with Lightning Fabric: the loop, the loss and the optimizer step are the user's.

    python -m gpp_examples.fabric_loop

Every process runs the loop; the calls of the model run in stages, micro-batch by micro-batch, in both directions.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpp_examples.plain_loop import Branches, batches
from lightning_gpp import GPPFabricStrategy


def train(fabric: Fabric, data: DataLoader[Any], path: str | None = None) -> list[float]:
    """The losses; with a path, the model and its optimizer are saved there after the last step."""
    torch.manual_seed(1)
    model = Branches().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for a, b, labels in fabric.setup_dataloaders(data):
        loss: Tensor = nn.functional.cross_entropy(model(a, b), labels)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if path is not None:
        fabric.save(path, {"model": model, "optimizer": optimizer})
    return losses


def samples() -> DataLoader[Any]:
    """The mini-batches of the plain loop."""
    return DataLoader(batches(), batch_size=None)


def main() -> None:
    strategy = GPPFabricStrategy(stages={"left": 0, "right": 1, "head": 1}, num_micro_batches=4)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    losses = train(fabric, samples())
    fabric.print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last")


if __name__ == "__main__":
    main()
