"""Models of `transformers`, cut into stages, compute what they compute whole."""

from __future__ import annotations

import pytest

from lightning_gpp.capture import capture_step
from tests.models import MODELS
from tests.stages.inprocess import assert_transparent, chain_of

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_split_equals_whole(name: str) -> None:
    module, batch, stages = MODELS[name]()
    module = module.double()
    captured = capture_step(module, batch)
    micro_batch_size = 8 if name == "clip" else 3
    assert_transparent(module, captured, chain_of(captured, stages, micro_batch_size), batch)
