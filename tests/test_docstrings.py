"""Docstrings say what a thing is or does: none begins with a relative or a preposition that leaves the subject out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lightning_gpp

PACKAGE = Path(lightning_gpp.__file__).parent
AVOIDED = re.compile(r"(What|Of|How|Where|By|As|Whether)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Strings that stand alone: docstrings of modules, classes and functions, and those below constants."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_docstrings_have_a_subject_or_a_verb() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in docstrings(path)
        if AVOIDED.match(text.strip())
    ]
    assert not found, "\n".join(found)
