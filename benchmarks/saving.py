"""Cost of saving, in seconds of a training step: files and folders, at once and in the background, side by side.

    python benchmarks/saving.py

Two gloo processes with one thread each train a pipeline of two stages of wide linear layers with AdamW, and save the
same path again and again; `--ranks 1` has both stages in one process, so that a second core is free for the thread that
writes. "Blocked" is the time for which training stands still for a checkpoint. "Added" is the median time of a round of
steps with one checkpoint, minus that of a round without: a thread that writes takes processor time from training, too,
unless a core is free. The variants take turns, a run of several rounds each.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GPPStrategy

VARIANTS = {
    "none": None,
    "full": ("full", False),
    "full, in the background": ("full", True),
    "sharded": ("sharded", False),
    "sharded, in the background": ("sharded", True),
}


class Wide(pl.LightningModule):
    """Two stages of the same size."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))) for _ in range(2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.second(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Rounds(pl.Callback):
    """Saves in the first step of every round, and notes the seconds of each step and of each round."""

    def __init__(self, variant: tuple[str, bool] | None, path: str, steps: int, rounds: int) -> None:
        self.variant, self.path, self.steps, self.rounds = variant, path, steps, rounds
        self.blocked: list[float] = []
        self.seconds: list[float] = []
        self.started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.started:
            self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.steps == 0:
            trainer.strategy.barrier()  # waiting for the other rank's step is no cost of saving
            before = time.perf_counter()
            if self.variant is not None:
                trainer.save_checkpoint(self.path)
            self.blocked.append(time.perf_counter() - before)
        if (batch_idx + 1) % self.steps == 0:
            trainer.strategy.barrier()
            self.seconds.append(time.perf_counter() - self.started)
            self.started = 0.0


def measure(name: str, folder: str, given: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds that saving blocked, and seconds of rounds."""
    variant = VARIANTS[name]
    kind, background = variant or ("full", False)
    devices = [given.ranks - 1, 0]
    modules = ["first"], ["second", "@step"]
    stages = [{"modules": part, "devices": [device]} for part, device in zip(modules, devices, strict=True)]
    strategy = GPPStrategy(stages=stages, num_micro_batches=4, state_dict_type=kind, async_save=background)
    rounds = Rounds(variant, f"{folder}/last.ckpt", given.steps, given.rounds + 1)
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=given.ranks, strategy=strategy, max_epochs=1, callbacks=[rounds], **quiet
    )
    samples = torch.randn(given.batch * given.steps * (given.rounds + 1), given.width)
    pl.seed_everything(0, verbose=False)
    trainer.fit(Wide(given.width, given.depth), DataLoader(TensorDataset(samples), batch_size=given.batch))
    shutil.rmtree(f"{folder}/last.ckpt", ignore_errors=True)
    return rounds.blocked[1:], rounds.seconds[1:]


def rank_main(rank: int, port: int, folder: str, given: argparse.Namespace, queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(given.ranks))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in VARIANTS}
    for name in [*VARIANTS] * given.turns:
        for kept, seconds in zip(found[name], measure(name, folder, given), strict=True):
            kept.extend(seconds)
    if rank == 0:
        queue.put(found)


def table(found: dict[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """Blocked and total seconds per checkpoint, and their ratios to the synchronous variant of the same kind."""
    plain = statistics.median(found["none"][1])
    heads = ["checkpoint", "blocked, s", "of synchronous", "added, s", "of synchronous"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in list(VARIANTS)[1:]:
        base = found[name.split(",")[0]]
        blocked, added = (statistics.median(found[name][i]) - i * plain for i in (0, 1))
        of = [blocked / statistics.median(base[0]), added / (statistics.median(base[1]) - plain)]
        lines.append(f"| {name} | {blocked:.3f} | {of[0]:.0%} | {added:.3f} | {of[1]:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2))
    parser.add_argument("--width", type=int, default=1024, help="width of the layers")
    parser.add_argument("--depth", type=int, default=8, help="layers of a stage")
    parser.add_argument("--batch", type=int, default=16, help="samples of a mini-batch")
    parser.add_argument("--steps", type=int, default=40, help="steps from one checkpoint to the next")
    parser.add_argument("--rounds", type=int, default=8, help="checkpoints, after one to warm up")
    parser.add_argument("--turns", type=int, default=2, help="runs of each variant")
    parser.add_argument("--folder", help="folder to write to; a temporary one by default")
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        queue = context.Queue()
        ranks = [
            context.Process(target=rank_main, args=(rank, port, folder, given, queue)) for rank in range(given.ranks)
        ]
        for process in ranks:
            process.start()
        found = queue.get()
        for process in ranks:
            process.join()
    num_bytes = 2 * given.depth * (given.width + 1) * given.width * 4 * 3
    seconds = statistics.median(found["none"][1])
    print(f"{num_bytes / 2**20:.0f} MiB per checkpoint; a round without one takes {seconds:.2f} s\n")
    print(table(found))


if __name__ == "__main__":
    main()
