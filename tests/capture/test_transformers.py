"""Models of `transformers`, cut into stages, compute what they compute whole."""

from __future__ import annotations

import pytest

from lightning_gpp.capture import batch_size_of, capture_step
from tests.models import NAMES, in_stages
from tests.stages.inprocess import assert_transparent, chain_of

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", NAMES)
def test_split_equals_whole(name: str) -> None:
    module, batch, stages = in_stages(name)
    captured = capture_step(module, batch)
    micro_batch_size = batch_size_of(batch) if name == "clip" else 3
    assert_transparent(module, captured, chain_of(captured, stages, micro_batch_size), batch)
