"""Recordings leave alone what is not theirs: lazy objects, iterators and files of the module, ids of tensors."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.capture.recording import StateRef
from lightning_gpp.capture.refusal import Changes
from lightning_gpp.errors import CaptureError


class Lazy:
    """Stands for something that is loaded when it is first used; here, never."""

    __slots__ = ("loaded",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not to be loaded.")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings, self.kept = nn.Linear(4, 4), Lazy(), {"lazy": [Lazy()]}

    def training_step(self, batch: Tensor) -> Tensor:
        return self.linear(batch).square().mean()


def test_lazy_objects_stay_as_they_are() -> None:
    assert capture_step(Model(), torch.randn(8, 4)).graph is not None


def test_iterators_and_files_are_the_modules_own(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.sources = {"numbers": [iter(range(3))]}  # type: ignore[assignment]
    with (tmp_path / "lines").open("w+") as module.file:  # type: ignore[assignment]
        copied = private_copy(module)
        copied.file.write("invented")
        for reads in (lambda: next(copied.sources["numbers"][0]), lambda: list(copied.file), copied.file.__getattr__):
            with pytest.raises(CaptureError, match=r"(?s)The step reads '(sources|file)'.*CombinedLoader"):
                reads() if reads.__name__ == "<lambda>" else reads("readline")
    assert list(module.sources["numbers"][0]) == [0, 1, 2]
    assert (tmp_path / "lines").read_text() == ""


def test_replaced_buffers_stay_known() -> None:
    """A buffer that a forward replaces must not lend its identity to tensors that come after it."""
    module = nn.BatchNorm1d(2)
    recorder = Recorder(4, Changes())
    recorder.watch(module)
    known = id(module.running_mean)
    module.running_mean = torch.ones(2)
    gc.collect()
    others: list[Tensor] = [torch.zeros(2) for _ in range(1000)]
    assert known not in map(id, others)
    assert not any(isinstance(recorder.refs(tensor), StateRef) for tensor in others)
