"""The tree of module paths that an operator graph mentions, and short names for sets of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Final

from lightning_gpp.graph import Operator, OperatorGraph
from lightning_gpp.plan import STEP

DATA: Final = "@source"
"""The module name of operators that represent the data."""


@dataclass(slots=True)
class ModuleNode:
    """A module: the operators of its own forward, and its submodules in the order of their first call."""

    path: str
    operators: list[Operator] = field(default_factory=list)
    children: dict[str, ModuleNode] = field(default_factory=dict)

    def all_operators(self) -> Iterator[Operator]:
        yield from self.operators
        for child in self.children.values():
            yield from child.all_operators()

    def walk(self) -> Iterator[ModuleNode]:
        yield self
        for child in self.children.values():
            yield from child.walk()

    @property
    def has_state(self) -> bool:
        """True if an operator inside reads a parameter or a buffer."""
        return any(operator.parameters or operator.buffers for operator in self.all_operators())


def module_tree(graph: OperatorGraph) -> ModuleNode:
    """The tree of all modules with operators; the data and the user's step are not modules."""
    root = ModuleNode("")
    for operator in graph:
        if operator.module not in (DATA, STEP):
            _descend(root, operator.module).operators.append(operator)
    return root


def _descend(root: ModuleNode, path: str) -> ModuleNode:
    node = root
    for part in filter(None, path.split(".")):
        name = f"{node.path}.{part}" if node.path else part
        node = node.children.setdefault(part, ModuleNode(name))
    return node


def around(paths: Iterable[str]) -> set[str]:
    """All modules that contain one of these paths, the root included; not the paths themselves unless they contain
    another.
    """
    return {path[:end] for path in paths for end, letter in enumerate(path) if letter == "."} | {""}


LONGEST_NAME = 20
"""Characters; a stage whose modules take more is named as a numbered part of what contains them."""


def stage_names(stage_modules: Sequence[Sequence[str]]) -> list[str]:
    """Short unique names for stages: `image_tower`, `blocks.0-3`, `text_tower/1`, `text_tower/2`, `head`.

    A prefix common to all paths is left out. `text_tower/1` is the first part of several modules of `text_tower`.
    """
    paths = [[module for module in modules if module != STEP] for modules in stage_modules]
    start = _common_start([path for listed in paths for path in listed])
    shown = [_listed([path[start:] for path in listed]) for listed in paths]
    roots = [shown[index] or _root([path[start:] for path in listed]) for index, listed in enumerate(paths)]
    counts = Counter(roots)
    numbers: Counter[str] = Counter()
    names = []
    for root, is_listed in zip(roots, map(bool, shown), strict=True):
        numbers[root] += 1
        is_part = counts[root] > 1 or not (is_listed or "+" in root or ".." in root)
        names.append(f"{root}/{numbers[root]}" if is_part else root)
    return names


def _common_start(paths: Sequence[str]) -> int:
    """Length of the path prefix common to all stages; 0 if only a number would be left as a name."""
    common = commonprefix([f"{path}." for path in paths])
    start = common.rfind(".") + 1
    rests = [path[start:] for path in paths]
    return start if all(rest and not rest[0].isdecimal() for rest in rests) else 0


def _listed(paths: Sequence[str]) -> str:
    """All modules of a stage, if that is short; otherwise empty."""
    if not paths or paths == [""]:
        return "model" if paths else "step"
    labels = [_label(parent, names) for parent, names in _by_parent(paths).items()]
    name = "+".join(labels)
    return name if len(labels) <= 2 and len(name) <= LONGEST_NAME else ""


def _root(paths: Sequence[str]) -> str:
    """The modules that contain those of a stage: `text_tower`, `branches.0`, `text_tower+head`, `vision..language`."""
    roots = list(dict.fromkeys(path.partition(".")[0] for path in paths))
    if len(roots) == 1:
        seconds = {path.partition(".")[2].partition(".")[0] for path in paths}
        return f"{roots[0]}.{seconds.pop()}" if len(seconds) == 1 and min(seconds).isdecimal() else roots[0]
    name = "+".join(roots)
    return name if len(roots) == 2 and len(name) <= LONGEST_NAME else f"{roots[0]}..{roots[-1]}"


def _by_parent(paths: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        groups.setdefault(parent, []).append(name)
    return groups


def _label(parent: str, names: list[str]) -> str:
    prefix = f"{parent}." if parent else ""
    if len(names) == 1:
        return prefix + names[0]
    if all(name.isdecimal() for name in names):
        return prefix + _ranges(sorted(map(int, names)))
    return prefix + names[0] + ("+" if len(names) == 2 else "..") + names[-1]


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
