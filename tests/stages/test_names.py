"""Any name that a user gives to a module or an argument works, and none of them is run as code."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_gpp.capture import capture_step
from tests.stages.inprocess import assert_transparent, chain_of

NAMES = ["out", "v0_0", "input0", "leaves", "torch", "1a", "class", "with-dash", "ﬁ", "a\nb", "'", "v1_0__kept", ""]


class Color(IntEnum):
    """Printed as `<Color.RED: 1>`, which is not an expression."""

    RED = 1


class Block(nn.Module):
    """Takes keyword arguments of any name, and returns a container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **given: Any) -> dict[Any, torch.Tensor]:
        return {Color.RED: self.linear(x) + given["a-b"] * given["class"], "shape": x * given["color"]}


class Named(L.LightningModule):
    """Calls two modules under a given name, one in a ModuleDict and one as an attribute, in a forward that is cut."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.parts = nn.ModuleDict({f"{name}!": Block(), "last": nn.Linear(4, 2)})
        self.add_module(name or "module", nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *_ = torch.chunk(getattr(self, self.name or "module")(x), 1)
        block = self.parts[f"{self.name}!"](first, **{"a-b": x, "class": 2.0, "color": Color.RED})
        return self.parts["last"](block[Color.RED] + block["shape"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()


@pytest.mark.parametrize("name", NAMES)
def test_modules_of_any_name(name: str) -> None:
    torch.manual_seed(1)
    module, batch = Named(name).double(), torch.randn(6, 4, dtype=torch.float64)
    captured = capture_step(module, batch)
    block = f"parts.{name}!"
    stages = [[name or "module"], [f"{block}.linear", "parts.last"]]
    assert_transparent(module, captured, chain_of(captured, stages, 3), batch)


@pytest.mark.parametrize(
    "name", ["open('written', 'w') or a", "a(x);open('written', 'w')#", "a\nopen('written', 'w')\nb"]
)
def test_no_name_is_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    test_modules_of_any_name(name)
    assert not list(tmp_path.iterdir())
