"""Lists names with several meanings: classes and type aliases that several modules define, and recurring file names.

    python -m benchmarks.names

A private class counts under its name without the underscore: a reader sees the same word. Public names are those that
`lightning_gpp` exports.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lightning_gpp

PACKAGE = Path(lightning_gpp.__file__).parent


def recurring_names(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Classes and type aliases that several modules define: name without underscore -> the places."""
    places: dict[str, dict[Path, str]] = defaultdict(dict)
    for path in sorted(package.rglob("*.py")):
        for name, line in _definitions(ast.parse(path.read_text())):
            places[name.lstrip("_")].setdefault(path, f"{path.relative_to(package)}:{line}")
    return {name: list(lines.values()) for name, lines in sorted(places.items()) if len(lines) > 1}


def recurring_files(package: Path = PACKAGE) -> dict[str, list[str]]:
    """File names that several folders use, `__init__.py` aside: name -> the folders."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        folders[path.name].append(str(path.parent.relative_to(package)))
    return {name: where for name, where in sorted(folders.items()) if len(where) > 1 and name != "__init__.py"}


def _definitions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
    for statement in tree.body:
        for target in _targets(statement):
            if _is_type_name(target.id):
                yield target.id, target.lineno


def _targets(statement: ast.stmt) -> list[ast.Name]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target for target in targets if isinstance(target, ast.Name)]


def _is_type_name(name: str) -> bool:
    """True for CamelCase, which only types have; constants and type parameters are upper-case."""
    return name.lstrip("_")[:1].isupper() and not name.isupper()


def main() -> None:
    names, files = recurring_names(), recurring_files()
    public = set(lightning_gpp.__all__)
    print(f"{len(names)} names of classes and types with several meanings, {len(names.keys() & public)} of them public")
    for name, places in names.items():
        print(f"  {name}{' (public)' if name in public else ''}: {', '.join(places)}")
    print(f"{len(files)} file names in several folders")
    for name, folders in files.items():
        print(f"  {name}: {', '.join(folders)}")


if __name__ == "__main__":
    main()
