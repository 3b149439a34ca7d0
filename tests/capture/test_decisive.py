"""Numbers of the step that decide what its modules get are found, wherever they are, and nothing is left changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from lightning_gpp.capture.captured import capture_step
from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.errors import CaptureError
from lightning_gpp.training.data.incoming import FrozenAttributes
from lightning_gpp.training.sessions import _frozen_in
from tests.capture import zoo
from tests.capture.zoo import Base


class Between(Base):
    """Computes between its module calls; subclasses say with what."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.b(self.between(self.a(batch["x"]))).mean()

    def between(self, h: Tensor) -> Tensor:
        return h


class Own(Between):
    """Also a private one, fixed points of simple changes, and numbers that decide nothing."""

    of_class = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.tau, self._tau, self.shift, self.limit = 1.0, 1.0, -0.5, float("inf")
        self.count, self.name = 0, "a"

    def between(self, h: Tensor) -> Tensor:
        self.log(f"{self.name}{self.count // 100}", 0.0)
        return (h / self.tau / self._tau + self.shift).clamp(max=self.limit) * self.of_class


class Inside(Between):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"tau": 1.0, "aux": False, "mode": "mean"})
        self.config = SimpleNamespace(sub=SimpleNamespace(tau=1.0))
        self.cache: dict[str, Any] = {}

    def between(self, h: Tensor) -> Tensor:
        self.cache["last"] = 3
        return h / self.hparams.tau / self.config.sub.tau * (2 if self.hparams.aux else 1)


class Changed(Between):
    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.5

    def between(self, h: Tensor) -> Tensor:
        h = h / self.tau
        self.tau *= 0.9
        return h


def watched(module: Base) -> FrozenAttributes:
    return _frozen_in(module, capture_step(module, zoo.batch()))


def test_comparisons_of_flags_between_modules_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as many as modules that the step calls, times all parameters."""
    recorded, record = list[str](), Recorder.record

    def noted(self: Recorder, function: Any, target: str, *args: Any, **kwargs: Any) -> Any:
        recorded.append(target)
        return record(self, function, target, *args, **kwargs)

    monkeypatch.setattr(Recorder, "record", noted)
    capture_step(Between(), zoo.batch())
    assert set(recorded) == {"linear", "mean"}


def test_own_numbers() -> None:
    """All fractions that the step reads early count."""
    found = capture_step(Own(), zoo.batch()).network.recording.decisive
    assert {name for _, name in found} == {"tau", "_tau", "shift", "limit", "of_class"}


def test_inside_of_objects() -> None:
    module = Inside()
    attributes = watched(module)
    assert attributes.announce() == 0
    module.config.sub = SimpleNamespace(tau=3.0)
    module.hparams.aux = True
    changed = attributes.changes()
    assert changed.pop(("", "config.sub.tau")) == 3.0
    assert changed.pop(("", "_hparams"))["aux"] is True
    assert set(changed) <= {("", "config.sub")}


def test_what_the_step_changes_itself_is_refused() -> None:
    with pytest.raises(CaptureError, match="the step changes '.*tau', on which depends what its modules get"):
        capture_step(Changed(), zoo.batch())
