"""What it costs that mini-batches have sequences of many lengths, beside mini-batches of one length.

    python -m benchmarks.lengths

GPT-2 with random weights trains for three epochs of 60 mini-batches, with plain Lightning in one process and as a
pipeline of two: all of the mean length, and of 50 lengths. The table has CPU milliseconds of the first process for a
mini-batch; the mean of the first epoch also has the few lengths that are captured.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from statistics import fmean, median
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_gpp import GPPStrategy

LAYERS, EPOCHS, MINI_BATCHES, LENGTHS, SHORTEST = 12, 3, 60, 50, 24


class Timed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"vocab_size": 100, "n_positions": 128, "n_embd": 64, "n_layer": LAYERS, "n_head": 4}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0))
        self.milliseconds: list[float] = []
        self._began = 0.0

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.milliseconds.append(1e3 * (time.process_time() - self._began))


def data(lengths: int) -> DataLoader[Tensor]:
    """Mini-batches `[8, length]` of so many lengths, with equally many tokens in all."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.arange(MINI_BATCHES) % lengths - lengths // 2
    sizes = SHORTEST + LENGTHS // 2 + spread[torch.randperm(MINI_BATCHES, generator=generator)]
    return DataLoader([torch.randint(100, (8, size), generator=generator) for size in sizes], batch_size=None)  # type: ignore[arg-type]


def fit(lengths: int, devices: int, strategy: Any) -> list[float]:
    """CPU milliseconds of all mini-batches."""
    module = Timed()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=EPOCHS,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(module, data(lengths))
    return module.milliseconds


def report(name: str, one: list[float], many: list[float]) -> None:
    for kind, times in (("one length", one), (f"{LENGTHS} lengths", many)):
        first, later = times[1:MINI_BATCHES], times[MINI_BATCHES:]
        print(f"| {name}, {kind} | {median(first):.1f} | {fmean(first):.1f} | {fmean(later):.1f} |", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    first = "LOCAL_RANK" not in os.environ
    if first:
        print("| | first epoch, median | first epoch, mean | later, mean |\n|---|---|---|---|")
        report("plain Lightning", *(fit(lengths, 1, "auto") for lengths in (1, LENGTHS)))
    halves = {f"model.transformer.h.{layer}": 2 * layer // LAYERS for layer in range(LAYERS)}
    stages = {
        "model.transformer.wte": 0,
        "model.transformer.wpe": 0,
        **halves,
        "model.transformer.ln_f": 1,
        "model.lm_head": 1,
    }
    found = [
        fit(lengths, 2, GPPStrategy(num_micro_batches=2, num_pipelines=1, stages=stages)) for lengths in (1, LENGTHS)
    ]
    if first:
        report("pipeline of two", *found)


if __name__ == "__main__":
    main()
