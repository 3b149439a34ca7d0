"""Peeking at data changes nothing; forms of batches are told apart by shape and dtype, not by samples or values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DataLoader, Dataset

from lightning_gpp.errors import ConfigError
from lightning_gpp.strategy.data import Placeholder, peek
from lightning_gpp.training.data.batches import outline, signature
from tests.strategy.harness import make_data


def loaders() -> dict[str, DataLoader[Any]]:
    data = make_data()
    return {
        "shuffled": DataLoader(data, batch_size=4, shuffle=True),
        "own generator": DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "not batched": DataLoader([tuple(tensor[:4] for tensor in data.tensors)] * 2, batch_size=None),
    }


@pytest.mark.parametrize("name", list(loaders()))
def test_peeking_gives_the_first_batch_and_changes_nothing(name: str) -> None:
    loader = loaders()[name]
    torch.manual_seed(0)
    iterator = iter(loader)  # Lightning does so before the strategy peeks
    peeked = peek(loader)
    first = next(iterator)
    torch.manual_seed(0)
    again = next(iter(loaders()[name]))
    torch.testing.assert_close(first, again)
    assert signature(peeked) == signature(first)
    assert len(peeked[0]) == 4


class Unreadable(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(f"{index}.png is not there")


def test_data_that_fail_at_once_are_told_with_the_line() -> None:
    told = (
        r"cannot make their first mini-batch: FileNotFoundError: 0\.png is not there \(.*test_data\.py:\d+\)\. \(gpp-"
    )
    with pytest.raises(ConfigError, match=told):
        peek(DataLoader(Unreadable(), batch_size=2))


def test_signatures() -> None:
    batch = {"x": torch.zeros(4, 3), "names": ["a", "b", "c", "d"], "scale": 2.0}
    longer = {"x": torch.ones(6, 3), "names": list("abcdef"), "scale": 3.0}
    assert signature(batch) == signature(longer) == signature(outline(batch))
    for changed in (
        {**batch, "x": torch.zeros(4, 5)},
        {**batch, "x": torch.zeros(4, 3).double()},
        {**batch, "more": torch.zeros(4)},
        {**batch, "scale": None},
    ):
        assert signature(changed) != signature(batch)


def test_a_placeholder_counts_its_samples() -> None:
    placeholder = Placeholder(torch.empty(7, 0))
    assert extract_batch_size(placeholder) == 7
    assert "Placeholder" in repr(placeholder)
