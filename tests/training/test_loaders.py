"""Shared mini-batches: the same samples, whatever the number of pipelines, and from any position on."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_gpp.errors import ConfigError
from lightning_gpp.training.data.loaders import SharedLoader

SAMPLES = torch.arange(24)


def loader(epoch: int = 0, **more: object) -> DataLoader[torch.Tensor]:
    sampler = DistributedSampler(SAMPLES, num_replicas=1, rank=0, seed=3)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return DataLoader(SAMPLES, batch_size=8, sampler=sampler, **more)  # type: ignore[arg-type]


def mini_batches(num_pipelines: int, **more: object) -> list[list[int]]:
    parts = [SharedLoader(loader(**more), pipeline, num_pipelines) for pipeline in range(num_pipelines)]
    return [torch.cat(shares).tolist() for shares in zip(*parts, strict=True)]


@pytest.mark.parametrize("num_pipelines", [1, 2, 4, 8])
def test_mini_batches_are_those_of_one_pipeline(num_pipelines: int) -> None:
    assert mini_batches(num_pipelines) == [batch.tolist() for batch in loader()]
    assert mini_batches(num_pipelines, num_workers=1) == mini_batches(1)


def test_a_loader_goes_on_at_its_position_on_another_number_of_pipelines() -> None:
    before = SharedLoader(loader(), 0, 2)
    batches = iter(before)
    next(batches)
    state = before.state_dict()
    assert len(next(batches)) == 4
    after = SharedLoader(loader(), 0, 1)
    after.load_state_dict(state)
    assert [batch.tolist() for batch in after] == mini_batches(1)[1:]
    assert [batch.tolist() for batch in after] == mini_batches(1), "only once"


def test_a_position_is_that_of_its_epoch() -> None:
    after = SharedLoader(loader(epoch=1), 0, 1)
    after.load_state_dict({"epoch": 0, "position": 3})
    assert [batch.tolist() for batch in after] == [batch.tolist() for batch in loader(epoch=1)]


def test_uneven_mini_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 samples cannot be shared evenly by 3 pipelines.*drop_last=True"):
        list(SharedLoader(loader(), 0, 3))


@pytest.mark.parametrize("other", [[SAMPLES], DataLoader(TensorDataset(SAMPLES), batch_size=None)])
def test_a_loader_without_batches_of_indices_is_refused(other: object) -> None:
    with pytest.raises(ConfigError, match="needs a torch.utils.data.DataLoader with a batch size"):
        SharedLoader(other, 0, 2)  # type: ignore[arg-type]
