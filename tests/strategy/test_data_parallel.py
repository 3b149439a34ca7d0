"""Samplers and data sets that divide samples among ranks, as under DDP, divide them among pipelines: none is lost."""

from __future__ import annotations

import multiprocessing
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_gpp.errors import ConfigError
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, make_data, make_module

SAMPLES = 16


class Sharded(IterableDataset[Any]):
    """Yields every n-th sample, by the numbers of the process group, or of the environment."""

    def __init__(self, numbers: Callable[[], tuple[int, int]]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        rank, size = self.numbers()
        data = make_data(SAMPLES)
        yield from (data[index] for index in range(rank, SAMPLES, size))

    def __len__(self) -> int:
        return SAMPLES // self.numbers()[1]


def of_group() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def of_environment() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def sampler(rank: int, size: int) -> DistributedSampler[Any]:
    return DistributedSampler(make_data(SAMPLES), num_replicas=size, rank=rank, shuffle=False)


def batches(rank: int, size: int) -> DataLoader[Any]:
    return DataLoader(make_data(SAMPLES), batch_sampler=BatchSampler(sampler(rank, size), 4, False))


LOADERS: dict[str, Callable[[int, int], DataLoader[Any]]] = {
    "sampler": lambda rank, size: DataLoader(make_data(SAMPLES), 4, sampler=sampler(rank, size)),
    "batch sampler": batches,
    "data in a worker": lambda *_: DataLoader(Sharded(of_group), 4, num_workers=1, multiprocessing_context="fork"),
    "data by the environment": lambda *_: DataLoader(Sharded(of_environment), 4, num_workers=1),
}


def trained(rank: int, size: int, pipelines: int, loaders: Callable[[int, int], DataLoader[Any]]) -> Any:
    """Losses of training, then those of validation, and the number of mini-batches predicted."""
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # the processes of tests are, without workers
    module = make_module()
    plain = size == 1
    strategy = "auto" if plain else harness.strategy(num_pipelines=pipelines, num_micro_batches=2, self_check=False)
    trainer = harness.trainer(strategy, size, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, loaders(rank, size), loaders(rank, size))
    predicted = trainer.predict(module, loaders(rank, size)) or []
    metrics = [entry["val_loss"] for entry in module.metrics]
    return module.losses, metrics, len(predicted)


def trained_on_all(rank: int, size: int, pipelines: int) -> dict[str, Any]:
    return {name: trained(rank, size, pipelines, loaders) for name, loaders in LOADERS.items()}


@pytest.mark.acceptance
def test_one_pipeline_trains_on_all_samples() -> None:
    losses, metrics, predicted = trained(0, 1, 1, LOADERS["sampler"])
    assert (len(losses), predicted) == (4, 4)
    for name, (own, own_metrics, own_predicted) in harness.run(2, trained_on_all, 2, 1)[0].items():
        assert own == pytest.approx(losses, rel=1e-12), name
        assert own_metrics == pytest.approx(metrics, rel=1e-12), name
        assert own_predicted == predicted, name


def trained_by_right_numbers(rank: int) -> tuple[Any, dict[str, Any]]:
    right = trained(rank, 4, 2, lambda rank, _: LOADERS["sampler"](rank // 2, 2))
    return right, {name: trained(rank, 4, 2, LOADERS[name]) for name in ("batch sampler", "data in a worker")}


def test_two_pipelines_divide_the_samples() -> None:
    first, _, second, _ = harness.run(4, trained_by_right_numbers)
    assert first[0][0] != second[0][0]
    for expected, found in (first, second):
        assert len(expected[0]) == 2
        for name, entry in found.items():
            assert entry[:2] == expected[:2], name
            assert entry[2] == expected[2] or name == "batch sampler", name  # which Lightning replaces in prediction


def refused(rank: int) -> list[str]:
    told = []
    for divided in (
        DistributedSamplerWrapper(SequentialSampler(make_data(SAMPLES)), num_replicas=2, rank=rank),
        sampler(rank, 3),
    ):
        with pytest.raises(ConfigError) as error:
            trained(rank, 2, 1, lambda *_, divided=divided: DataLoader(make_data(SAMPLES), 4, sampler=divided))
        told.append(str(error.value))
    return told


def test_samplers_that_cannot_be_corrected_are_refused() -> None:
    for wrapper, other in harness.run(2, refused):
        assert "DistributedSamplerWrapper" in wrapper
        assert "num_replicas=2" in wrapper
        assert "num_replicas=3" in other
        assert "Leave the sampler out: Lightning makes the right one." in other


def told_of_whole_data(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(rank, 4, 2, lambda *_: DataLoader(make_data(SAMPLES), 4, shuffle=True))
    return [str(warning.message) for warning in caught if "the samples among" in str(warning.message)]


def test_pipelines_that_train_on_the_same_samples_are_told() -> None:
    first, *others = harness.run(4, told_of_whole_data)
    assert first[0].startswith("A data loader does not divide the samples among the 2 pipelines")
    assert others == [[]] * 3


class Scaled(TwoTowers):
    """Multiplies the rate by a number of processes."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads

    def configure_optimizers(self) -> Any:
        if self.reads == "trainer":
            self.lr *= self.trainer.world_size * self.trainer.world_size
        else:
            self.lr *= self.trainer.distributed_sampler_kwargs["num_replicas"]  # type: ignore[index]
        return super().configure_optimizers()


def told_of_reads(rank: int) -> list[list[str]]:
    told = []
    for reads in ("trainer", "sampler"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = harness.trainer(harness.strategy(), 2, max_epochs=1)
            trainer.fit(Scaled(reads).double(), LOADERS["sampler"](rank, 2))
        found = [str(warning.message) for warning in caught]
        told.append([text for text in found if re.search("distributed_sampler_kwargs|^DistributedSampler of", text)])
    return told


def test_reads_of_the_number_of_processes_are_told_with_the_line() -> None:
    first, second = harness.run(2, told_of_reads)
    (told,) = [text for text in first[0] if not text.startswith("DistributedSampler")]
    assert told.startswith(f"world_size is the number of processes, 2 ({__file__}:")
    assert all(any(text.startswith("DistributedSampler of a data loader") for text in told) for told in first)
    assert len(first[1]) == 1
    assert second == [[], []]
