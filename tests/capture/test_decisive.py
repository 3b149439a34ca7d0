"""Numbers of the step that decide what its modules get are found, wherever they are, and nothing is left changed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpp.capture import captured
from lightning_gpp.capture.captured import capture_step
from lightning_gpp.errors import CaptureError
from lightning_gpp.training.dependencies.frozen_attributes import FrozenAttributes
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


class Validated:
    """Refuses values, as classes of attrs and pydantic do."""

    def __init__(self) -> None:
        object.__setattr__(self, "_tau", 1.0)

    __slots__ = ("_tau",)

    @property
    def tau(self) -> float:
        return self._tau

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(f"{value} is not allowed")


class Refusing(Between):
    def __init__(self) -> None:
        super().__init__()
        self.config = Validated()

    def between(self, h: Tensor) -> Tensor:
        return h / self.config.tau


class InDict(Between):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"tau": 1.0}

    def between(self, h: Tensor) -> Tensor:
        h = h / self.state["tau"]
        self.state["tau"] *= 0.9
        return h


class InObject(Between):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(tau=1.0)

    def between(self, h: Tensor) -> Tensor:
        h = h / self.config.tau
        self.config.tau *= 0.9
        return h


def watched(module: Base) -> FrozenAttributes:
    return _frozen_in(module, capture_step(module, zoo.batch()))


def test_own_numbers() -> None:
    found = capture_step(Own(), zoo.batch()).network.recording.decisive
    assert {name for _, name in found} == {"tau", "_tau", "shift", "limit", "of_class"}


def test_inside_of_objects() -> None:
    module = Inside()
    attributes = watched(module)
    assert attributes.announce() == 0
    module.config.sub = SimpleNamespace(tau=3.0)
    module.hparams.aux = True
    assert attributes.changes() == {("", "_hparams.aux"): True, ("", "config.sub.tau"): 3.0}


@pytest.mark.parametrize("kind", [InDict, InObject])
def test_what_the_step_changes_itself_is_refused(kind: type[Base]) -> None:
    with pytest.raises(CaptureError, match="the step changes '.*tau', on which depends what its modules get"):
        capture_step(kind(), zoo.batch())


@pytest.mark.parametrize("kind", [Own, Inside])
def test_a_capture_changes_nothing(kind: type[Base]) -> None:
    module = kind()
    before = {name: copy.deepcopy(value) for name, value in vars(module).items() if name[:1] != "_" or name == "_tau"}
    capture_step(module, zoo.batch())
    assert {name: vars(module)[name] for name in before} == before
    assert vars(module).keys() == vars(kind()).keys()


def test_objects_that_refuse_values_are_left_alone() -> None:
    assert capture_step(Refusing(), zoo.batch()).network.recording.decisive == {}


class Many(Between):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({f"h{number}": 1.0 for number in range(24)})

    def between(self, h: Tensor) -> Tensor:
        for number in range(0, 24, 2):
            h = h * self.hparams[f"h{number}"]
        return h


@pytest.mark.parametrize(("kind", "most"), [(Between, 3), (Many, 5)])
def test_recordings_are_few(kind: type[Base], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = list[int](), captured.record

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(captured, "record", counted)
    capture_step(kind(), zoo.batch())
    assert len(made) <= most


def test_values_are_restored_when_a_recording_fails() -> None:
    """A number that is a size: with another one the step fails."""

    class Sized(Between):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(width=8)

        def between(self, h: Tensor) -> Tensor:
            return h + torch.ones(self.config.width, dtype=h.dtype)

    module = Sized()
    found = capture_step(module, zoo.batch()).network.recording.decisive
    assert found == {("", "config.width"): 8}
    assert module.config.width == 8
