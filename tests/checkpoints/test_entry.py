"""The entry of this library in a checkpoint is checked before a run relies on it."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpp.checkpoints.layout import entry_of
from lightning_gpp.errors import CheckpointError


@pytest.mark.parametrize(
    ("checkpoint", "match"),
    [
        ([1], r"a.ckpt cannot be resumed: it is no mapping"),
        ({"gpp": "text"}, r"its entry 'gpp' is a str"),
        ({"gpp": {"seed": 1, "step": "many"}}, r"its entry gpp.step is 'many', not a whole number"),
        ({"gpp": {"seed": -1, "step": 2}}, r"its entry gpp.seed is -1, not a whole number, 0 or more"),
        ({"gpp": {"seed": 1, "step": True}}, r"its entry gpp.step is True, not a whole number"),
        ({"gpp": {"pipeline": {"updates": None}}}, r"its entry gpp.pipeline.updates is None, not a whole number"),
        ({"gpp": {"pipeline": [0] * 1000}}, r"its entry gpp.pipeline is \[0, .{0,90}, not of the type mapping"),
    ],
)
def test_a_malformed_entry_is_refused(checkpoint: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        entry_of(checkpoint, "a.ckpt")


def test_an_entry_may_be_missing() -> None:
    assert entry_of({}, "a.ckpt") == {}
    assert entry_of({"gpp": {"seed": 3}}, "a.ckpt") == {"seed": 3}
