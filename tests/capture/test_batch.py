"""The parts of a batch that are cut into micro-batches, and those that every micro-batch gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gpp.capture import slice_batch
from lightning_gpp.capture.batch import cut_of

BOXES = [torch.zeros(n, 4) for n in (1, 3, 2, 5)]
X = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize(
    ("value", "length"),
    [
        (X, 2),
        (["a", "b", "c", "d"], 2),
        ((1, 2, 3, 4), 2),
        ([{"boxes": boxes} for boxes in BOXES], 2),
        (BOXES, 2),
        (tuple(BOXES), 2),
        ([[1, 2], [3], [], [4]], 2),
        (torch.zeros(5, 5), 5),
        ([X, X, X, X], 4),  # four inputs, each with all samples
        ([1, 2, 3], 3),
    ],
    ids=["tensor", "texts", "tuple", "mappings", "ragged", "tuple of ragged", "sequences", "mask", "inputs", "others"],
)
def test_what_is_per_sample(value: Any, length: int) -> None:
    batch = {"x": X, "value": value}
    part = slice_batch(batch, 1, 3, 4)
    assert part["x"].tolist() == X[1:3].tolist()
    assert len(part["value"]) == length
    assert type(part["value"]) is type(value)
    cut, passed = cut_of(batch)
    assert len(cut) + len(passed) >= 2


def test_entries_are_those_of_the_samples() -> None:
    part = slice_batch([X, [{"boxes": boxes} for boxes in BOXES]], 1, 3, 4)
    assert [len(target["boxes"]) for target in part[1]] == [3, 2]


def test_the_batch_itself_is_not_a_list_of_samples() -> None:
    batch = [{"x": torch.zeros(2, 3)}, {"y": torch.zeros(2, 1)}]  # two loaders
    part = slice_batch(batch, 0, 1, 2)
    assert [tuple(leaf.shape) for entry in part for leaf in entry.values()] == [(1, 3), (1, 1)]


def test_names_and_sizes() -> None:
    batch = {"x": X, "mask": torch.zeros(5, 5), "names": ["a", "b", "c", "d"], "scale": 2.0, "none": None}
    cut, passed = cut_of(batch)
    assert cut == ["['x'] (4, 2)", "['names'] (list of 4)"]
    assert passed == ["['mask'] (5, 5)", "['scale'] (float)"]
