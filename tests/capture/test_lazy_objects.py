"""Objects whose `__getattr__` does something else than Python's are not asked for what they have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture_step


class Lazy:
    """Stands for something that is loaded when it is first used; here, never."""

    __slots__ = ("loaded",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not to be loaded.")


SETTINGS = Lazy()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings, self.kept = nn.Linear(4, 4), SETTINGS, {"lazy": [Lazy()]}

    def training_step(self, batch: Tensor) -> Tensor:
        return self.linear(batch).square().mean()


def test_lazy_objects_stay_as_they_are() -> None:
    captured = capture_step(Model(), torch.randn(8, 4))
    assert captured.graph is not None
