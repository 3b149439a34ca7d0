"""The pages of the documentation, and the code on them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = sorted(DOCS.rglob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page that are in one language."""
    return re.findall(rf"(?m)^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def scripts(page: Path) -> dict[str, str]:
    """The scripts of a page by name: blocks that begin with `# name.py`."""
    named = ((re.match(r"# (\w+\.py)\n", code), code) for code in blocks(page, "python"))
    return {name[1]: code for name, code in named if name}
