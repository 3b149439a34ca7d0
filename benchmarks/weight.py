"""The weight of the house: what somebody who wants to hold it in the head has to read, beside its budget.

    python -m benchmarks.weight

Lines are those of Python files, words those of README and all pages of docs. `benchmarks.journey` counts the files and
changes of file of a training step and of a plan. A private name of Lightning is one with an underscore that `_compat`
uses and does not define.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_gpp"


def lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))


def words() -> int:
    return sum(len(page.read_text().split()) for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))


def private_names() -> set[str]:
    """Names with one underscore in front that the adapters to Lightning use and do not define."""
    trees = [ast.parse(file.read_text()) for file in (PACKAGE / "_compat").glob("lightning*.py")]
    used, own = (set().union(*map(names, trees)) for names in (_used, _defined))
    return {name for name in used - own if re.match("_[^_]", name)}


def _used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and "lightning" in (node.module or "").partition(".")[0]:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value  # of getattr, setattr and vars


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def journeys() -> dict[str, tuple[str, str]]:
    """Files, and changes of file, of a step and of a plan."""
    command = [sys.executable, "-m", "benchmarks.journey"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"\| a (?:training )?(step|plan) \| (\d+) \| (\d+) \|", printed)
    return {name: (files, changes) for name, files, changes in rows}


def main() -> None:
    passed = journeys()
    table = [
        ("lightning_gpp/, lines", lines(PACKAGE), 45_000),
        ("files directly in training/", len(list((PACKAGE / "training").glob("*.py"))), 20),
        ("a training step, files", passed["step"][0], 20),
        ("a training step, changes of file", passed["step"][1], 340),
        ("a plan, files", passed["plan"][0], 45),
        ("tests/, lines", lines(ROOT / "tests"), 38_000),
        ("benchmarks/, lines", lines(ROOT / "benchmarks"), 5_000),
        ("private names of Lightning", len(private_names()), 10),
        ("docs, words", words(), 25_000),
    ]
    print("| | now | at most |\n|---|---|---|")
    for name, now, most in table:
        print(f"| {name} | {now} | {most} |")


if __name__ == "__main__":
    main()
