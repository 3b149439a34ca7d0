"""A rank needs memory for its own part only, to start, to save and to load a model that is several times as large.

The kernel enforces it: an allocation beyond the rank's share and a tenth of it fails. (It counts the stack of a thread
with its whole size, of which a thread touches some kilobytes; so stacks are not counted here.)
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import load_pretrained
from tests.strategy import harness
from tests.strategy.harness import loader, make_module

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1300)]

WIDTH, DEPTH, RANKS = 1024, 96, 4
PARAMETERS = DEPTH * WIDTH * (WIDTH + 1) * 4
"""Bytes of the parameters of a rank."""
SHARE = 3 * PARAMETERS
"""Bytes of the parameters of a rank and of their optimizer's state."""
MORE = 0.1
"""The part of its share that a rank may need in addition."""
STACKS = 12 * resource.getrlimit(resource.RLIMIT_STACK)[0]
"""Bytes of the stacks of the threads that a run starts, mostly for messages."""


class Large(pl.LightningModule):
    """As many equal parts as there are ranks, built without memory."""

    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        with torch.device("meta"):
            layers = [[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)] for _ in range(RANKS)]
            self.parts = nn.Sequential(*(nn.Sequential(*part) for part in layers))
        if self.folder is not None:
            load_pretrained(self.parts, self.folder)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.parts(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Limited(pl.Callback):
    """Limits the memory of this process before training begins and while it saves.

    Args:
        path: the checkpoint to save after training, if any.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.needed: dict[str, float] = {}
        self.before, self.threads = data_bytes(), len(os.listdir("/proc/self/task"))
        limit(self.before + STACKS + int((1 + MORE) * SHARE))

    def on_train_start(self, *_: Any) -> None:
        check_that_a_model_does_not_fit()
        limit(None)
        threads = len(os.listdir("/proc/self/task")) - self.threads
        stacks = threads * resource.getrlimit(resource.RLIMIT_STACK)[0]
        assert stacks <= STACKS
        self.needed["start"] = (data_bytes() - self.before - stacks) / SHARE

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.path is not None:
            limit(data_bytes() + int(MORE * SHARE))
            check_that_a_model_does_not_fit()
            trainer.save_checkpoint(self.path)
            limit(None)


def data_bytes() -> int:
    """Bytes of this process that RLIMIT_DATA limits: memory that it may write to, and that is no file."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def limit(num_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes or resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def check_that_a_model_does_not_fit() -> None:
    with pytest.raises(RuntimeError, match="allocate memory"):
        torch.empty(RANKS * PARAMETERS, dtype=torch.uint8)


def train(rank: int, source: str | None, folder: str | None, path: str | None) -> dict[str, float]:
    stages = [{"modules": [f"parts.{i}"], "devices": [RANKS - 1 - i]} for i in range(RANKS)]
    stages[-1]["modules"].append("@step")
    warm_up = harness.trainer(harness.strategy(stages={"left": 0, "right": 1, "head": 1}, num_pipelines=2), RANKS)
    warm_up.fit(make_module(), loader())  # imports, pools of memory
    strategy = harness.strategy(stages=stages, state_dict_type="sharded", self_check=False)
    limited = Limited(path)
    data = DataLoader(TensorDataset(torch.ones(8, WIDTH)), batch_size=8)
    harness.trainer(strategy, RANKS, callbacks=[limited], max_epochs=1 + (source is not None)).fit(
        Large(folder), data, ckpt_path=source
    )
    return limited.needed


def write_files(folder: Path) -> None:
    """The parameters as safetensors files, one for each part."""
    from safetensors.torch import save_file

    folder.mkdir()
    for part in range(RANKS):
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        values = {f"{part}.{name}": parameter.detach() for name, parameter in layers.named_parameters()}
        save_file(values, folder / f"model-{part}.safetensors")


def test_a_rank_has_memory_for_its_share_only(tmp_path: Path) -> None:
    path, folder = str(tmp_path / "large.ckpt"), tmp_path / "files"
    print("saved", harness.run(RANKS, train, None, None, path, timeout=400))
    print("loaded", harness.run(RANKS, train, path, None, None, timeout=400))
    write_files(folder)
    print("started from files", harness.run(RANKS, train, None, str(folder), None, timeout=400))
