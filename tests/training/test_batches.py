"""The form of mini-batches: batches with one outer form have the same samples and signature."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gpp.capture.batch import samples_in
from lightning_gpp.errors import ShapeError
from lightning_gpp.training.data.batches import outer_form, outline, signature

X, Y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(ShapeError, match="The mini-batch has a generator, .*Let the data loader's collate_fn return"):
        outline(each for each in (X, Y))


@pytest.mark.parametrize(
    "other",
    [
        {"x": X[:3], "y": Y[:3]},
        {"x": X.T, "y": Y},
        {"x": X, "z": Y},
        {"x": (X, X), "y": Y},
        [X, Y],
        (X, Y),
    ],
    ids=["samples", "sizes", "name", "container inside", "list", "tuple"],
)
def test_what_differs_has_another_outer_form(other: Any) -> None:
    assert outer_form({"x": X, "y": Y}) != outer_form(other) is not None


def test_the_outer_form_determines_samples_and_signature() -> None:
    batch, same = {"x": [X, (Y,)]}, {"x": [X + 1, (Y + 1,)]}
    assert outer_form(batch) == outer_form(same) is not None
    assert samples_in(batch) == samples_in(same)
    assert signature(batch) == signature(same)


@pytest.mark.parametrize(
    "batch", ["text", 3, [X, "text"], {"x": [X, None]}, torch.nn.Parameter(X), [torch.nn.Parameter(X)]]
)
def test_other_content_has_no_outer_form(batch: Any) -> None:
    """Texts and numbers can be lists of samples, and subclasses of tensors can mean anything."""
    assert outer_form(batch) is None
