"""The page of the public interface: its names are those that the package exports, and its examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_gpp
from tests.interpreter import run_ranks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/python.md").read_text()
SECTIONS = re.split(r"(?m)^## ", PAGE)[1:]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def names_of(section: str) -> list[str]:
    return re.findall(r"`(\w+)`", section.splitlines()[0])


def test_page_lists_the_public_names() -> None:
    listed = [name for section in SECTIONS for name in names_of(section)]
    assert sorted(listed) == sorted(lightning_gpp.__all__)


def test_all_public_names_exist() -> None:
    assert all(hasattr(lightning_gpp, name) for name in lightning_gpp.__all__)
    assert dir(lightning_gpp) == sorted(lightning_gpp.__all__)


@pytest.mark.parametrize("section", SECTIONS, ids=[section.split(":")[0] for section in SECTIONS])
def test_every_name_has_an_example(section: str) -> None:
    code = "".join(BLOCK.findall(section))
    assert not [name for name in names_of(section) if not re.search(rf"\b{name}\b", code)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The first example as `train.py`; the others as `api.md`, in the lines of the page, which tracebacks then name."""
    first, *others = BLOCK.finditer(PAGE)
    (tmp_path / "train.py").write_text(first[1])
    lines = [""] * PAGE.count("\n")
    for block in others:
        start, code = PAGE.count("\n", 0, block.start(1)), block[1].splitlines()
        lines[start : start + len(code)] = code
    (tmp_path / "api.md").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize(("script", "ranks"), [("train.py", 3), ("api.md", 1)])
def test_examples_run(script: str, ranks: int, folder: Path) -> None:
    paths = os.pathsep.join([str(folder), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = run_ranks(ranks, script, cwd=folder, timeout=170, environment=environment)
    assert ended.returncode == 0, ended.stderr


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, lightning_gpp; print([name for name in ('torch', 'lightning', 'numpy') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
