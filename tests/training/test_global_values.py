"""A global variable that changes during training is told once."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_gpp.training.dependencies.global_values import GlobalValues

SCALE = 1.0


class Scaled(nn.Module):
    pass


def test_the_first_change_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    values = GlobalValues(nn.Sequential(Scaled(), nn.Linear(1, 1)), told.append)
    values.check()
    assert not told
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    values.check()
    values.check()
    assert len(told) == 1
    assert f"The global variable SCALE of {__name__} changed" in told[0]
