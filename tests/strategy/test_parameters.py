"""Modules that the trainer builds without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader


class Lazy(TwoTowers):
    """Built without memory, where the trainer says."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Identity()

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.left = nn.Sequential(nn.Linear(4, 6), nn.Identity()).double()


def fit_lazily(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Lazy().double()
    harness.trainer(harness.strategy(), 2).fit(module, loader())
    return {"losses": module.losses, "left": [p.is_meta for p in module.left.parameters()]}


def test_modules_from_the_meta_device_are_initialised_where_they_run() -> None:
    found = harness.run(2, fit_lazily)
    assert found[0]["losses"][-1] < found[0]["losses"][0]
    assert found[1]["left"] == [False, False]
    assert found[0]["left"] == [True, True]  # rank 0 never had them
