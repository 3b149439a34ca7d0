"""Collectives of users: in steps and forwards `torch.distributed` means the pipelines, as in data parallelism."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from lightning_gpp.errors import CheckpointError
from lightning_gpp.failure import hangs
from lightning_gpp.strategy.checkpoints import saved_by_all
from tests.failure.pipeline_rank import processes_running
from tests.sampling import sample
from tests.strategy import harness


class Center(nn.Module):
    """A loss that keeps the mean of its targets over all ranks, as self-distillation does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, logits: Tensor) -> Tensor:
        center = logits.detach().sum(0)
        if dist.is_initialized():
            dist.all_reduce(center)
            center = center / dist.get_world_size()
        return self.scale * (logits - center / len(logits)).square().sum(1)


class Communicating(harness.TwoTowers):
    """Its steps and a module call collectives of every kind."""

    def __init__(self, gathers: bool = True) -> None:
        super().__init__()
        self.center, self.gathers = Center(), gathers
        self.seen_by_all: list[Any] = []

    def common(self, batch: Any) -> Tensor:
        a, b, y = batch
        count = torch.tensor(float(len(y)), dtype=torch.float64)
        features = self.left(a)
        if self.gathers:
            features = self.all_gather(features, sync_grads=True).reshape(-1, len(y), 6).mean(0)
        logits = self.head(torch.cat([features, self.right[:2](b)], dim=1))
        if dist.is_initialized():
            dist.barrier()
            dist.all_reduce(count)
            count = functional.all_reduce(count, "sum", dist.group.WORLD) / dist.get_world_size() ** 2
        self.trainer.strategy.barrier()
        count = self.trainer.strategy.broadcast(count)
        return (nn.functional.cross_entropy(logits, y, reduction="sum") + 0.1 * self.center(logits).sum()) / count

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.common(batch)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.common(batch)
        found = [len(batch[0])]
        if dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, len(batch[0]))
        self.seen_by_all += [found]
        self.log("val_loss", loss, sync_dist=True)
        self.seen.append(loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class Lonely(harness.TwoTowers):
    """A hook in which one rank calls what all have to call."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and batch_idx == 1:
            if self.path:
                self.trainer.save_checkpoint(self.path)
            else:
                dist.barrier()


def fitted(strategy: Any, size: int = 8, gathers: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Communicating(gathers).double()
    trainer = harness.trainer(strategy, 1 if strategy == "auto" else 2, use_distributed_sampler=True)
    loader = harness.loader(16, size)
    trainer.fit(module, loader, loader)
    weights = [value.numpy() for value in module.state_dict().values() if not value.is_meta]
    return {"losses": module.losses, "weights": weights, "seen": module.seen_by_all, "metrics": module.metrics}


STAGES = [
    {"modules": ["left"], "devices": [1]},
    {"modules": ["right", "head", "center", "@step"], "devices": [0]},
]


def on_two_devices(rank: int, step: str) -> dict[str, Any]:
    micro = {} if step == "auto" else {"step": step}
    return fitted(harness.strategy(stages=STAGES, num_micro_batches=1, timeout=20.0, **micro))


@pytest.mark.parametrize("step", sample(["auto", "whole"], ["auto"]))
def test_with_one_pipeline_they_are_those_of_one_process(step: str) -> None:
    expected, (first, other) = fitted("auto"), harness.run(2, on_two_devices, step)
    assert first["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert other["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert first["seen"] == expected["seen"] or step == "whole"
    for found, known in zip(first["weights"], expected["weights"], strict=True):
        assert found == pytest.approx(known, abs=1e-12)
    for found, known in zip(first["metrics"], expected["metrics"], strict=True):
        assert found == pytest.approx(known, abs=1e-12)


def on_two_pipelines(rank: int) -> dict[str, Any]:
    return fitted(harness.strategy(stages=None, num_pipelines=2, num_micro_batches=1, timeout=20.0), 4, False)


def test_with_several_pipelines_they_go_over_these() -> None:
    first, other = harness.run(2, on_two_pipelines)
    assert [value.tolist() for value in first["weights"]] == [value.tolist() for value in other["weights"]]
    assert {tuple(found) for found in first["seen"]} == {(4, 4)}


def alone(rank: int, world_size: int, port: int, path: str) -> None:
    hangs.STUCK = 5.0
    harness.enter(rank, world_size, port)
    harness.trainer(harness.strategy(timeout=600.0), 2).fit(Lonely(path).double(), harness.loader())


@pytest.mark.parametrize("what", sample(["save_checkpoint", "barrier"], ["save_checkpoint"]))
def test_a_call_of_one_rank_alone_is_told_with_its_line(tmp_path: Path, what: str) -> None:
    """All ranks wait for each other, and none moves, so the job ends long before the time limit of collectives."""
    path = str(tmp_path / "saved.ckpt") if what == "save_checkpoint" else ""
    with processes_running(tmp_path, 2, alone, path) as running:
        running.wait_for("Hang report", 80)
        running.wait(20)
        told = re.search(r"Hang report: (.*)", running.output(0))
        assert told is not None
        assert re.search(r"called from \S*test_collectives.py:\d+ in on_train_batch_end", told[1])
        assert re.search(r"All ranks wait for others: 0 for rank 1, 1 for rank 0", running.output(0)), running.output(0)
    assert running.codes == [1, 1]
    cause = r"First cause: rank 0 .* waits in a call that rank 1 does not make.*trainer.is_global_zero"
    assert re.search(cause, running.output(1)), running.output(1)


@pytest.mark.parametrize(("ended", "kind"), [(True, CheckpointError), (False, dist.DistError)])
def test_after_the_run_a_rank_that_saves_alone_is_told(ended: bool, kind: type[Exception]) -> None:
    match = "Let every rank call trainer.save_checkpoint" if ended else "closed"
    with pytest.raises(kind, match=match), saved_by_all(ended=ended):
        raise dist.DistError("Connection closed by peer")
