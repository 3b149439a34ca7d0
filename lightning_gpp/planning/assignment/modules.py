"""The tree of module paths that an operator graph mentions, short names for sets of them, and blocks.

Blocks are modules whose results can be computed again for the backward. One that is recomputed keeps only what it
receives, so what it frees is what autograd would save inside, less that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Final

from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.plan import SOURCE, STEP, Edge, Figures, Stage
from lightning_gpp.schedules.lowering import carries_gradient

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


LONGEST_NAME: Final = 20
"""Characters; a stage whose modules take more is named as a numbered part of what contains them."""


def stage_names(stage_modules: Sequence[Sequence[str]]) -> list[str]:
    """Short unique names for stages: `image_tower`, `blocks.0-3`, `text_tower/1`, `text_tower/2`, `head`.

    A prefix common to all paths is left out. `text_tower/1` is the first part of several modules of `text_tower`.
    """
    paths = [[module for module in modules if module != STEP] for modules in stage_modules]
    start = _common_start([path for listed in paths for path in listed])
    names = [_name([path[start:] for path in listed]) for listed in paths]
    counts, numbers, found = Counter(names), Counter[str](), list[str]()
    for name in names:
        numbers[name] += 1
        is_part = name.endswith("/") or counts[name] > 1
        found.append(f"{name.removesuffix('/')}/{numbers[name]}" if is_part else name)
    return found


def _common_start(paths: Sequence[str]) -> int:
    """Length of the path prefix common to all stages; 0 if only a number would be left as a name."""
    common = commonprefix([f"{path}." for path in paths])
    start = common.rfind(".") + 1
    rests = [path[start:] for path in paths]
    return start if all(rest and not rest[0].isdecimal() for rest in rests) else 0


def _name(paths: Sequence[str]) -> str:
    """All modules of a stage if that is short, or else the modules that contain them, with a slash if it is one."""
    if not paths or paths == [""]:
        return "model" if paths else "step"
    parents: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        parents.setdefault(f"{parent}." if parent else "", []).append(name)
    name = "+".join(parent + _joined(names) for parent, names in parents.items())
    roots = list(dict.fromkeys(path.partition(".")[0] for path in paths))
    if len(name) <= LONGEST_NAME or len(paths) == 1:
        return name
    return f"{roots[0]}/" if len(roots) == 1 else f"{roots[0]}..{roots[-1]}"


def _joined(names: Sequence[str]) -> str:
    """Consecutive numbers as a range."""
    first = int(names[0]) if names[0].isdecimal() else 0
    is_range = len(names) > 1 and list(names) == [str(first + index) for index in range(len(names))]
    return f"{names[0]}-{names[-1]}" if is_range else "+".join(names)


# -- blocks -----------------------------------------------------------------------------------------------------------

LOSS: Final = 0.1
"""A module is divided into smaller blocks unless they would free this share less: they need less memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunBlock:
    """A module that runs again as a whole.

    Args:
        path: of the module.
        operators: names of all operators inside.
        saved: bytes that autograd saves inside.
        received: bytes that the block receives, and keeps instead.
    """

    path: str
    operators: frozenset[str]
    saved: Affine
    received: Affine

    def freed(self, num_samples: int) -> float:
        """Bytes of a micro-batch that need not be kept."""
        return self.saved.at(num_samples) - self.received.at(num_samples)


def blocks_of(graph: OperatorGraph) -> tuple[RerunBlock, ...]:
    """The blocks of a model: the smallest modules that free nearly as much as larger ones, for example its layers."""
    return tuple(_smallest(graph, module_tree(graph)))


def recomputed_blocks(graph: OperatorGraph, operators: Collection[str], paths: Iterable[str]) -> list[RerunBlock]:
    """The modules inside of `paths`, as large as possible, that a stage with these operators calls as a whole."""
    paths = tuple(paths)
    known = {node.path: node for node in module_tree(graph).walk()} if paths else {}
    return [block for path in paths if path in known for block in _inside(graph, known[path], operators)]


def _smallest(graph: OperatorGraph, node: ModuleNode) -> list[RerunBlock]:
    """See `blocks_of`; the blocks in a module."""
    parts = [block for child in node.children.values() for block in _smallest(graph, child)]
    if not _is_called(graph, node):
        return parts
    whole = _block(graph, node)
    freed = sum(block.freed(1) for block in parts)
    return parts if whole.freed(1) <= 0 or freed >= (1 - LOSS) * whole.freed(1) else [whole]


def _inside(graph: OperatorGraph, node: ModuleNode, operators: Collection[str]) -> Iterator[RerunBlock]:
    """The largest blocks in a module that have none but these operators."""
    mine = [operator.name in operators for operator in node.all_operators()]
    if mine and all(mine) and _is_called(graph, node):
        yield _block(graph, node)
    elif any(mine):
        for child in node.children.values():
            yield from _inside(graph, child, operators)


def _is_called(graph: OperatorGraph, node: ModuleNode) -> bool:
    return bool(node.path) and node.path not in graph.uncalled


def _block(graph: OperatorGraph, node: ModuleNode) -> RerunBlock:
    inside = [*node.all_operators()]
    names = frozenset(operator.name for operator in inside)
    edges = graph.nx.in_edges(names, data="outputs")
    received = {(source, output) for source, _, outputs in edges if source not in names for output in outputs}
    return RerunBlock(
        path=node.path,
        operators=names,
        saved=sum((operator.saved_bytes for operator in inside), Affine()),
        received=sum((graph[source].outputs[output].affine_bytes for source, output in received), Affine()),
    )


def figures_of(
    graph: OperatorGraph,
    assignment: Mapping[str, tuple[int, ...]],
    stages: Sequence[Stage],
    edges: Iterable[Edge],
) -> list[Figures]:
    """The figures of stages, without seconds."""
    received, leaves = ([Affine() for _ in stages] for _ in range(2))
    for edge in edges:
        received[edge.dst] += edge.bytes
        leaves[edge.dst] += edge.bytes if carries_gradient(edge) else Affine()
    operators = operators_of(graph, assignment, len(stages))
    figures = [_figures(graph, *entry) for entry in zip(stages, operators, received, strict=True)]
    return [
        _offloaded(stage, entry, staying) if stage.offload else entry
        for stage, entry, staying in zip(stages, figures, leaves, strict=True)
    ]


def operators_of(
    graph: OperatorGraph, assignment: Mapping[str, tuple[int, ...]], num_stages: int
) -> list[list[Operator]]:
    """The operators of every stage, in recorded order."""
    operators: list[list[Operator]] = [[] for _ in range(num_stages)]
    for operator in graph:
        for stage in assignment[operator.name]:
            if stage != SOURCE:
                operators[stage].append(operator)
    return operators


def _offloaded(stage: Stage, figures: Figures, leaves: Affine) -> Figures:
    """The figures if all that the stage keeps lies in host memory, but for the inputs that collect gradients."""
    rest, share = figures.activation_bytes - leaves, -(-stage.micro_batch_size // len(stage.devices))
    offloaded = rest if rest.at(share) > 0 else Affine()
    return replace(figures, activation_bytes=leaves, offloaded_bytes=offloaded)


def _figures(graph: OperatorGraph, stage: Stage, operators: Sequence[Operator], received: Affine) -> Figures:
    pending: dict[tuple[str, int], Affine] = {}
    for operator in operators:
        pending.update(_for_weights(graph, operator))
    names = {name for operator in operators for name in operator.parameters}
    kept, working = _held(graph, stage, operators, received)
    return Figures(
        flops=sum((operator.flops for operator in operators), Affine()),
        activation_bytes=kept,
        working_bytes=working,
        pending_bytes=sum(pending.values(), Affine()),
        num_parameters=sum(graph.parameter_sizes[name] for name in names),
        parameter_bytes=sum(graph.parameter_bytes[name] for name in names),
    )


def _held(graph: OperatorGraph, stage: Stage, operators: Sequence[Operator], received: Affine) -> tuple[Affine, Affine]:
    """Bytes that a stage keeps, and those that it needs besides to run something again."""
    saved = sum((operator.saved_bytes for operator in operators), Affine())
    if stage.reruns:
        return received, saved
    blocks = recomputed_blocks(graph, {operator.name for operator in operators}, stage.recomputed_blocks)
    kept = sum((block.received - block.saved for block in blocks), saved)
    largest = max((block.saved for block in blocks), key=lambda size: size.at(stage.micro_batch_size), default=Affine())
    return kept, largest


def _for_weights(graph: OperatorGraph, operator: Operator) -> dict[tuple[str, int], Affine]:
    """Bytes that an operator's weight gradients need: its inputs, and the gradients of its outputs."""
    if not operator.parameters:
        return {}
    read = [
        (source, output)
        for source, _, outputs in graph.nx.in_edges(operator.name, data="outputs")
        for output in outputs
    ]
    inputs = {(source, output): graph[source].outputs[output].affine_bytes for source, output in read}
    return {**inputs, **{(operator.name, -1 - i): spec.affine_bytes for i, spec in enumerate(operator.outputs)}}
