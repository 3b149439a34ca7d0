"""The parts of a batch that are cut into micro-batches, and those that every micro-batch gets."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_gpp.capture import batch_size_of, slice_batch
from lightning_gpp.capture.batch import counting_note, cut_note, known_to_pytree
from lightning_gpp.errors import ConfigError, ShapeError

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
    assert "value" in cut_note(batch)


def test_entries_are_those_of_the_samples() -> None:
    part = slice_batch([X, [{"boxes": boxes} for boxes in BOXES]], 1, 3, 4)
    assert [len(target["boxes"]) for target in part[1]] == [3, 2]


def test_the_batch_itself_is_not_a_list_of_samples() -> None:
    batch = [{"x": torch.zeros(2, 3)}, {"y": torch.zeros(2, 1)}]  # two loaders
    part = slice_batch(batch, 0, 1, 2)
    assert [tuple(leaf.shape) for entry in part for leaf in entry.values()] == [(1, 3), (1, 1)]


@dataclass(frozen=True)
class Data:
    x: torch.Tensor
    names: list[str]


def test_objects() -> None:
    batch = Data(X, ["a", "b", "c", "d"])
    assert batch_size_of(batch) == 4
    part = slice_batch(batch, 1, 3, 4)
    assert type(part) is type(batch)
    assert torch.equal(part.x, X[1:3])
    assert part.names == ["b", "c"]
    assert batch.names == ["a", "b", "c", "d"]


def test_other_mappings() -> None:
    part = slice_batch(known_to_pytree([UserDict(x=X, n=2)]), 1, 3, 4)
    assert torch.equal(part[0]["x"], X[1:3])
    assert part[0]["n"] == 2


TIME_MAJOR = {
    "tokens": torch.zeros(7, 4),
    "weights": torch.zeros(4),
    "clouds": BOXES,
    "inner": {"x": torch.zeros(7, 4)},
}
DIMS = {"tokens": 1, "weights": None, "inner": 1}


def test_the_user_says_what_counts_samples() -> None:
    assert batch_size_of(TIME_MAJOR, DIMS) == 4
    part = slice_batch(TIME_MAJOR, 1, 3, 4, DIMS)
    assert part["tokens"].shape == part["inner"]["x"].shape == (7, 2)
    assert part["weights"].shape == (4,)
    assert [len(cloud) for cloud in part["clouds"]] == [3, 2]
    cut = "tokens (7, 4) along dimension 1, clouds (list of 4), inner.x (7, 4) along dimension 1"
    assert cut_note(TIME_MAJOR, DIMS) == f"Cut into micro-batches: {cut}. Given to every micro-batch: weights (4,)."
    assert batch_size_of([torch.zeros(7, 4), torch.zeros(3, 4)], {"": 1}) == 4
    assert batch_size_of({"images": [torch.zeros(3, 9, 9)] * 4}, {"images": 0}) == 4


def test_what_the_user_says_has_to_fit() -> None:
    with pytest.raises(ConfigError, match=r"batch_dims names 'token', which is no part.*mean tokens"):
        batch_size_of(TIME_MAJOR, {"token": 1})
    with pytest.raises(ConfigError, match=r"dimension 2 of tokens counts .* no tensor there .* tokens \(7, 4\)"):
        batch_size_of(TIME_MAJOR, {"tokens": 2})
    with pytest.raises(ShapeError, match=r"dimension 0 of 'weights' counts samples, but its shape is \(4,\)"):
        slice_batch(TIME_MAJOR, 0, 2, 7, {"tokens": 0, "weights": 0})


def test_lists_that_count_samples() -> None:
    assert batch_size_of({"clouds": BOXES}) == 4
    assert batch_size_of((["a"], [torch.zeros(3, 8, 8)] * 2, [{"boxes": boxes} for boxes in BOXES[:2]])) == 2
    assert batch_size_of({"loader": [torch.zeros(4, 3), torch.zeros(4)]}) == 4


def test_a_wrong_count_of_samples_is_told_with_the_setting() -> None:
    frames, labels = torch.zeros(5, 16, 3), torch.zeros(16)
    note = counting_note({"frames": frames, "labels": labels})
    assert note.startswith("Cut into micro-batches: frames (5, 16, 3). Given to every micro-batch: labels (16,).")
    assert note.endswith("set strategy.batch_dims={'frames': 1, 'labels': 0}.")
    assert batch_size_of({"frames": frames, "labels": labels}, {"frames": 1, "labels": 0}) == 16
