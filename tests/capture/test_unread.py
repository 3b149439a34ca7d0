"""A copy of a module refuses to read its iterators and files, and drops what it would write."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.errors import CaptureError


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
