"""Every path, module and link that the documentation names exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_gpp"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
ROOMS = sorted(
    path.name for folder in (ROOT, PACKAGE) for path in folder.iterdir() if path.is_dir() and path.name != "runs"
)

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PYTHON_FILE = re.compile(r"(?<![\w/.*<-])((?:\w+/)*\w+\.py)\b")
IN_A_ROOM = re.compile(rf"(?<![\w/.*<~-])((?:{'|'.join(map(re.escape, ROOMS))})/[\w/.-]*\w/?)(?![\w*<])")
MODULE = re.compile(r"(?:python -m |from |import )((?:lightning_gpp|benchmarks|gpp_examples|tests)(?:\.\w+)*)")
EXAMPLES = {"train.py"}
"""Files that a reader writes."""


def is_there(path: str) -> bool:
    """Paths are those of the repository, or of the package."""
    return path in EXAMPLES or any((folder / path).exists() for folder in (ROOT, PACKAGE))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_paths_exist(page: Path) -> None:
    text = page.read_text()
    paths = {*PYTHON_FILE.findall(text), *IN_A_ROOM.findall(LINK.sub("]", text))}
    assert not [path for path in sorted(paths) if not is_there(path)]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not [name for name in sorted(set(MODULE.findall(text))) if importlib.util.find_spec(name) is None]
