"""Names have one meaning: few classes share theirs, and no public one does."""

from __future__ import annotations

from pathlib import Path

import lightning_gpp
from benchmarks.names import recurring_files, recurring_names

MOST = 10


def test_few_class_names_recur() -> None:
    names = recurring_names()
    assert len(names) <= MOST, names


def test_no_public_name_recurs() -> None:
    assert not recurring_names().keys() & set(lightning_gpp.__all__)


def test_private_names_and_aliases_count(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("class Plan: ...\nRoom = int\nMOST = 3\nT = TypeVar('T')\n")
    (tmp_path / "second.py").write_text("class _Plan: ...\n_Room: TypeAlias = str\nMOST = 4\nT = TypeVar('T')\n")
    assert recurring_names(tmp_path) == {"Plan": ["first.py:1", "second.py:1"], "Room": ["first.py:2", "second.py:2"]}
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "first.py").touch()
    assert recurring_files(tmp_path) == {"first.py": [".", "folder"]}
