"""Peeking at data changes nothing; forms of batches are told apart by shape and dtype, not by samples or values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gpp.errors import ConfigError
from lightning_gpp.strategy.data import Placeholder, peek
from lightning_gpp.training.batches import outline, signature
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader, make_data, make_module


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


def test_batches_that_are_left_out_are_no_example() -> None:
    batches = DataLoader([None, torch.ones(2)], batch_size=None)
    torch.testing.assert_close(peek(batches), torch.ones(2))


class Unreadable(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(f"{index}.png is not there")


def test_data_that_fail_at_once_are_told_with_the_line() -> None:
    told = r"cannot make their first mini-batch: FileNotFoundError: 0\.png is not there \(.*test_data\.py:\d+\)\.$"
    with pytest.raises(ConfigError, match=told):
        peek(DataLoader(Unreadable(), batch_size=2))


def test_workers_that_persist_are_left_alone() -> None:
    loader = DataLoader(make_data(), batch_size=4, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    peeked = peek(loader)
    torch.testing.assert_close(next(iterator), peeked)


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


class Positioned:
    """Goes on where it was, from the batch after the one of its state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        for position, batch in list(enumerate(loader()))[self.position :]:
            self.position = position
            yield batch

    def __len__(self) -> int:
        return 3

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"] + 1


def losses_on(rank: int, devices: int) -> list[float]:
    """Train on data that can be read once; `devices` is 0 for plain Lightning."""
    strategy = harness.strategy(**({"stages": None} if devices == 1 else {})) if devices else "auto"
    module, trainer = make_module(), harness.trainer(strategy, max(1, devices), max_epochs=1)
    trainer.fit(module, Positioned())
    return module.losses


def test_data_that_can_be_read_once_is_not_lost() -> None:
    (plain,) = harness.run(1, losses_on, 0)
    assert len(plain) == 3
    for devices in (1, 2):
        losses, *_ = harness.run(devices, losses_on, devices)
        assert losses == pytest.approx(plain, rel=1e-12)


class Widen(nn.Module):
    def forward(self, packed: Tensor) -> Tensor:
        return packed.to(torch.float64)


class Packed(TwoTowers):
    """Gets numbers in types that pickle does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.left.insert(0, Widen())
        self.right.insert(0, Widen())


def losses_of_packed(rank: int, devices: int) -> list[float]:
    torch.manual_seed(0)
    module, (a, b, y) = Packed().double(), make_data().tensors
    data = TensorDataset((a.abs() * 100).to(torch.uint16), b.to(torch.float8_e4m3fn), y)
    strategy = harness.strategy(num_micro_batches=2) if devices > 1 else "auto"
    harness.trainer(strategy, devices, max_epochs=1).fit(module, DataLoader(data, batch_size=8))
    return module.losses


def test_unsigned_numbers_and_floats_of_eight_bits_are_data_like_others() -> None:
    (plain,) = harness.run(1, losses_of_packed, 1)
    for losses in harness.run(2, losses_of_packed, 2):
        assert losses == pytest.approx(plain, rel=1e-12)
