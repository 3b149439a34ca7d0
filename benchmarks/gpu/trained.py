"""Training by Lightning's Trainer: what the towers log with this library and with Lightning's own strategy."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.towers import Batch, Shape, Towers, layout, ordinary
from lightning_gpp import GPPStrategy

MINI_BATCHES = 4


class Trained(pl.LightningModule):
    """The towers, with what a Trainer asks for."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.towers = Towers(shape)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.towers.training_step(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.towers.training_step(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def trained(device: torch.device, precision: str) -> float:
    """The largest relative difference of what two epochs log, from Lightning's training of the undivided model."""
    names = {"left": "towers.left", "right": "towers.right", "head": "towers.head", "@step": "@step"}
    stages = [
        {**stage, "modules": [names[name] for name in stage["modules"]]} for stage in layout(dist.get_world_size())
    ]
    found = _logged(device, precision, GPPStrategy(stages=stages, num_micro_batches=2), dist.get_world_size())
    expected = _logged(device, precision, "auto", 1)
    return max(abs(found[name] / value - 1) for name, value in expected.items())


def _logged(device: torch.device, precision: str, strategy: Any, num_nodes: int) -> Mapping[str, float]:
    """Every process is a machine of its own for Lightning, as several of them may share a GPU."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(NODE_RANK=str(dist.get_rank()), LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29500")
    shape = replace(ordinary(device), width=64)
    pl.seed_everything(0, verbose=False)
    tensors = [torch.randn(MINI_BATCHES * 32, shape.width, dtype=_dtype(precision)) for _ in range(2)]
    loader = DataLoader(TensorDataset(*tensors, torch.randint(0, 16, (len(tensors[0]),))), 32)
    trainer = pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1 if device.index is None else [device.index],
        num_nodes=num_nodes,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=2,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Trained(shape), loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _dtype(precision: str) -> torch.dtype:
    return torch.float64 if precision == "64-true" else torch.float32
