"""No file of the package imports itself through others, not even for types or inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

import lightning_gpp

ROOT = Path(lightning_gpp.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a file names in an import, wherever it stands; all of them are absolute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in FILES else str(node.module) for name in names)


def test_no_circle() -> None:
    """The package's own page of names is left out: it loads what it names at first use."""
    modules = {name: path for name, path in FILES.items() if name != "lightning_gpp"}
    graph = nx.DiGraph((name, other) for name, path in modules.items() for other in imports(path))
    graph.remove_nodes_from([name for name in list(graph) if name not in modules])
    assert list(nx.simple_cycles(graph)) == []
