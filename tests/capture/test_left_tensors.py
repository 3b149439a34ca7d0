"""Recordings leave no tensor without values in the caches in which forwards keep tensors."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp import capture_step
from lightning_gpp.errors import ConfigError

BY_LENGTH: dict[int, Tensor] = {}
LATEST: dict[str, Any] = {"size": 1, "table": torch.zeros(1)}
RECENT: list[Tensor] = []
TABLE: Tensor | None = None


class Store:
    """Keeps tables in an object, and their size beside them."""

    def __init__(self) -> None:
        self.size, self.tables = 0, OrderedDict[int, Tensor]()

    def table(self, size: int) -> Tensor:
        if self.size < size:
            self.size, self.tables[0] = size, torch.arange(float(size))
        return self.tables[0][:size]


STORE = Store()


class OfClass:
    tables: dict[int, Tensor] = {}
    latest: Tensor | None = None


def by_length(size: int) -> Tensor:
    if size not in BY_LENGTH:
        BY_LENGTH[size] = torch.arange(float(size))
    return BY_LENGTH[size]


def replaced(size: int) -> Tensor:
    if LATEST["size"] < size:
        LATEST.update(size=size, table=torch.arange(float(size)))
    table: Tensor = LATEST["table"]
    return table


def in_list(size: int) -> Tensor:
    RECENT.append(torch.arange(float(size)))
    return RECENT[-1]


def in_variable(size: int) -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = torch.arange(float(size))
    return TABLE


def in_class(size: int) -> Tensor:
    if size not in OfClass.tables:
        OfClass.tables[size] = torch.arange(float(size))
        OfClass.latest = OfClass.tables[size]
    return OfClass.tables[size]


def in_default(size: int, tables: dict[int, tuple[Tensor]] = {}) -> Tensor:  # noqa: B006
    if size not in tables:
        tables[size] = (torch.arange(float(size)),)
    return tables[size][0]


def remembered(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    known: dict[int, Tensor] = {}

    def answer(size: int) -> Tensor:
        if size not in known:
            known[size] = function(size)
        return known[size]

    return answer


in_closure = remembered(lambda size: torch.arange(float(size)))


class Network(nn.Module):
    def __init__(self, table: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.layer, self.table, self.store = nn.Linear(4, 4), table, Store()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.table(x.shape[1]) + self.store.table(x.shape[1]))


TABLES = (by_length, replaced, in_list, in_variable, in_class, in_default, in_closure, STORE.table)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: str(table.__name__))
def test_caches_of_numbers_have_values_afterwards(table: Callable[[int], Tensor]) -> None:
    network = Network(table)
    assert len(list(capture_step(network, torch.ones(2, 4)).graph)) > 1
    assert type(table(4)) is Tensor
    assert table(4).tolist() == [0, 1, 2, 3]
    assert network.store.size == 0
    assert not network.store.tables


@functools.lru_cache
def mask(size: int) -> Tensor:
    return torch.ones(size, size).tril()


class Causal(nn.Module):
    """Blocks that share a cached mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) @ mask(x.shape[1])
        return x


def test_modules_that_share_a_cache_are_cut() -> None:
    captured = capture_step(Causal(), torch.ones(2, 4))
    assert not captured.uncut
    assert mask(4).tolist() == torch.ones(4, 4).tril().tolist()


LAST: list[Tensor] = []


class Leaving(nn.Module):
    """Keeps what depends on the mini-batch outside of the module."""

    kept: dict[str, Tensor] = {}

    def __init__(self, keep: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.keep = nn.Linear(4, 4), keep

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.keep(loss)
        return loss


@functools.lru_cache
def remember(tensor: Tensor) -> Tensor:
    return tensor


LEAVING = {
    "LAST": LAST.append,
    "Leaving": lambda tensor: Leaving.kept.update(loss=tensor),
    "remember": remember,
}


@pytest.mark.parametrize("holder", LEAVING)
def test_tensors_without_values_are_refused(holder: str) -> None:
    try:
        with pytest.raises(ConfigError, match=f"{holder} of {__name__} keeps one of them.*register_buffer"):
            capture_step(Leaving(LEAVING[holder]), torch.ones(2, 4))
    finally:
        LAST.clear()
        Leaving.kept.clear()
        remember.cache_clear()
