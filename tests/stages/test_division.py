"""Micro-batches with sizes of their own: which samples and rows they get."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.errors import ConfigError
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from lightning_gpp.stages.division import SAMPLES, Division, documents, equal_work, with_rows
from lightning_gpp.stages.rows import RowOwner, known_rows, owners_of, rows_of_samples
from tests.strategies import chain


def division(by: Any = SAMPLES, number: int = 2, rows: dict[str, str] | None = None) -> Division:
    return Division(by=by, owners=owners_of(rows or {}), number=number, dims=dict.fromkeys(rows or {}))


def padded(lengths: list[int]) -> dict[str, torch.Tensor]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    numbers = torch.arange(mask.numel()).reshape(mask.shape)
    return {"ids": numbers, "mask": mask.long(), "pairs": mask[:, None] & mask[:, :, None], "class": numbers[:, 0]}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 4))
def test_no_other_groups_of_these_lengths_have_less_work(lengths: list[int], number: int) -> None:
    def work(groups: list[list[int]]) -> int:
        return max(len(group) * max(1, *(lengths[i] for i in group)) for group in groups)

    groups = equal_work(lengths, number)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    assert 1 <= len(groups) <= number
    ways = itertools.product(range(number), repeat=len(lengths))
    all_groups = ([[i for i, g in enumerate(way) if g == n] for n in set(way)] for way in ways)
    assert work(groups) == min(map(work, all_groups))


def test_a_micro_batch_has_no_padding_that_none_of_its_samples_needs() -> None:
    parts = division("mask:except0").parts(padded([2, 9, 3, 1]))
    assert [tuple(part["mask"].shape) for part in parts] == [(1, 9), (3, 3)]
    assert tuple(parts[1]["pairs"].shape) == (3, 3, 3)
    assert parts[1]["class"].tolist() == [18, 0, 27]
    assert parts[1]["ids"].tolist() == [[18, 19, 20], [0, 1, 2], [27, 28, 29]]


@pytest.mark.parametrize("owner", ["count", "whose", "ids:only1"])
def test_rows_go_with_their_samples(owner: str) -> None:
    batch = {
        "ids": torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]]),
        "count": torch.tensor([2, 0, 1, 3]),
        "whose": torch.tensor([0, 0, 2, 3, 3, 3]),
        "images": torch.arange(6),
    }
    rows = {"images": owner, "whose": owner} if owner != "whose" else {"images": owner}
    first, second = division(rows=rows).parts({**batch, "whose": batch["whose"]})
    assert (first["images"].tolist(), second["images"].tolist()) == ([0, 1], [2, 3, 4, 5])


def test_rows_of_rows_are_counted_by_products() -> None:
    batch = {"ids": torch.tensor([[7, 7], [7, 0]]), "grid": torch.tensor([[1, 2], [2, 2], [1, 1]])}
    owners = owners_of({"grid": "ids:only7", "pixels": "grid:product"})
    found = rows_of_samples({**batch, "pixels": torch.zeros(7, 3)}, 2, owners)
    assert found == {"grid": [range(2), range(2, 3)], "pixels": [range(6), range(6, 7)]}


def test_owners_that_do_not_fit_are_told() -> None:
    batch = {"x": torch.zeros(2, 1), "count": torch.tensor([2, 2]), "images": torch.zeros(3)}
    with pytest.raises(ConfigError, match=r"'images' has 3 rows, but count gives \[2, 2\] to 2 samples"):
        division(rows={"images": "count"}).parts(batch)
    with pytest.raises(ConfigError, match=r"no tensor or list of the mini-batch\. Did you mean count"):
        division(rows={"images": "counts"}).parts(batch)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1, 0, 2, 0]], [[0, 1], [2, 3]]),  # each has some
        ([[2, 1, 0, 0]], [[0, 2], [1, 3]]),
        ([[3, 0, 0, 0]], [[0, 1, 2, 3]]),  # not enough for two
        ([[0, 0, 0, 0]], [[0, 1], [2, 3]]),  # nobody has any
    ],
)
def test_no_micro_batch_lacks_rows_if_there_are_enough(rows: list[list[int]], expected: list[list[int]]) -> None:
    assert with_rows(4, 2, rows) == expected


@pytest.mark.parametrize("kind", ["cumulative", "positions", "flat"])
def test_documents_stay_in_one_piece(kind: str) -> None:
    lengths = [3, 1, 4, 2, 2]
    tokens, ends = torch.arange(12)[None], torch.tensor([0, *lengths]).cumsum(0)
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = {
        "cumulative": {"ids": tokens, "seqlens": ends, "most": 4},
        "positions": {"ids": tokens, "position_ids": places},
        "flat": {"ids": tokens[0], "seqlens": ends},
    }[kind]
    parts = documents(batch, 2)
    assert [part["ids"].flatten().tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]]
    if kind != "positions":
        assert [part["seqlens"].tolist() for part in parts] == [[0, 3, 4], [0, 4, 6, 8]]
    assert len(documents(batch, 9)) == 5


def test_a_batch_without_documents_is_told() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_by=documents needs a packed row"):
        documents(padded([2, 3]), 2)


@pytest.mark.parametrize(("images", "found"), [([2, 0, 1], True), ([1, 1, 1], False), ([2, 0, 0], True)])
def test_layouts_of_transformers_are_known(images: list[int], found: bool) -> None:
    module = torch.nn.Linear(1, 1)
    module.config = SimpleNamespace(image_token_id=9)  # type: ignore[assignment]
    ids = torch.tensor([[9] * 2 * count + [0] * (6 - 2 * count) for count in images])
    batch = {"input_ids": ids, "pixel_values": torch.zeros(sum(images), 3)}
    assert known_rows(module, batch) == ({"pixel_values": "input_ids:only9"} if found else {})


def test_an_index_of_rows_counts_the_samples_of_its_micro_batch() -> None:
    batch = {"x": torch.zeros(4), "whose": torch.tensor([0, 0, 2, 3, 3]), "boxes": torch.arange(5)}
    first, second = division(rows={"boxes": "whose"}).parts(batch)
    assert (first["whose"].tolist(), second["whose"].tolist()) == ([0, 0], [0, 1, 1])
    assert second["boxes"].tolist() == [2, 3, 4]


def test_wrong_names_and_lost_samples_are_told() -> None:
    with pytest.raises(ConfigError, match=r"batch_rows names 'boxen', .* Did you mean boxes"):
        division(rows={"boxen": "count"}).check({"boxes": torch.zeros(2), "count": torch.ones(2)})
    with pytest.raises(ConfigError, match=r"micro-batches of \[2, 2\] samples for 6 samples"):
        division(lambda batch, number: [batch[:2], batch[2:4]]).parts(torch.zeros(6))
    with pytest.raises(ConfigError, match="returned a dict; it has to return a list"):
        division(lambda batch, number: {"x": batch}).parts(torch.zeros(2))


def test_functions_return_as_many_as_they_are_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"returned 3 micro-batches; it has to return at least 1, and at most the 2"):
        division(lambda batch, number: [batch] * 3).parts(torch.zeros(2))


@pytest.mark.parametrize("text", ["count", "a.b", "ids:only-1", "grid:product"])
def test_owners_are_written_as_they_are_read(text: str) -> None:
    assert str(RowOwner.parsed(text)) == text


def two_stages(work: Iterable[float]) -> Timeline:
    plan = chain((1, 1), 2)
    return simulate(compile_program(plan), replace(StageCosts.uniform(plan), work=tuple(work)))


def test_a_note_says_what_equal_work_saves() -> None:
    """Micro-batches of 8 and 3 words instead of 8 and 12; of 5 and 8 instead of 9 and 4."""
    by_work, batch = division("mask:except0"), padded([4, 1, 1, 2, 1])
    told = by_work.note(batch, by_work.parts(batch), two_stages)
    assert "0.58 of the time of equal numbers of samples as they come, with a bubble of 37% instead of 33%" in told
    places = torch.cat([torch.arange(length) for length in (5, 4, 1, 1, 2)])[None]
    by_documents, packed = division("documents"), {"ids": places, "position_ids": places}
    told = by_documents.note(packed, by_documents.parts(packed), two_stages)
    assert "0.97 of the time of equal numbers of documents as they come, with a bubble of 33% instead of 35%" in told
