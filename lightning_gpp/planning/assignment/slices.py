"""Slices the stages of a plan along the sequence (`strategy.slices`), see `lightning_gpp.slices`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import networkx as nx

from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import Affine, Operator, OperatorGraph, TensorSpec
from lightning_gpp.plan import SOURCE, STEP, Edge, Figures, Plan, Stage
from lightning_gpp.planning.assignment.assign import Assignment, assign, crossing
from lightning_gpp.simulation.stage_costs import StageCosts
from lightning_gpp.slices import CARRY, COSTS, DIM, Unsliced, part_of, slice_name

ValueKey = tuple[str, int]
"""Operator and number of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """The slicing that the user asks for.

    Args:
        slices: number of slices, or the tokens of each.
        modules: paths of the modules that may be sliced; None: all that can be.
    """

    slices: int | tuple[int, ...]
    modules: tuple[str, ...] | None = None

    @property
    def number(self) -> int:
        """Number of slices."""
        return self.slices if isinstance(self.slices, int) else len(self.slices)


def carried(graph: OperatorGraph) -> dict[str, tuple[Operator, int]]:
    """The operators that carry a tensor to later tokens, by name, with the tensor's token dimension."""
    found = {}
    for operator in graph:
        if operator.target.startswith(CARRY):
            dim = int(operator.target.removeprefix(CARRY))
            found[operator.name] = operator, dim % len(operator.outputs[0].shape)
    return found


def carried_by(
    graph: OperatorGraph, assignment: Mapping[str, Sequence[int]], stage: int
) -> list[tuple[TensorSpec, int]]:
    """Spec and token dimension of the tensors that a stage carries, unsliced, in the order of its operators."""
    found = carried(graph)
    return [(operator.outputs[0], dim) for name, (operator, dim) in found.items() if stage in assignment[name]]


def carried_bytes(graph: OperatorGraph, assignment: Mapping[str, Sequence[int]], stage: int) -> Affine:
    """Bytes of all carried tensors of a stage, for the unsliced sequence."""
    return sum((spec.affine_bytes for spec, _ in carried_by(graph, assignment, stage)), Affine())


def is_cut(spec: TensorSpec, length: int) -> bool:
    """True if a tensor between stages has one index per token."""
    return len(spec.shape) > DIM and spec.shape[DIM] == Affine(0, length)


def cut_spec(spec: TensorSpec, dim: int, tokens: int) -> TensorSpec:
    """The spec of a slice of the tensor with this many tokens."""
    return replace(spec, shape=(*spec.shape[:dim], Affine(0, tokens), *spec.shape[dim + 1 :]))


def kept_together(graph: OperatorGraph) -> OperatorGraph:
    """The graph with operators tied into clusters, so that every tensor that can cross a stage border has the sequence
    in dimension 1.

    Operators joined by a tensor that has it in another dimension form a cluster, and so does each module that carries,
    as attention does.

    Raises:
        ConfigError: no tensor has tokens in that dimension; or the model carries inside its own activation
            checkpointing, which would recompute it when no slice is computed.
    """
    carriers = [operator for operator, _ in carried(graph).values()]
    for operator in carriers:
        if operator.cluster:
            raise ConfigError(
                f"strategy.slices: {operator.module or 'the model'!r} carries to later tokens ({operator.line}) inside "
                "activation checkpointing, which would run it again outside its slice. Remove the checkpointing "
                "there, and use strategy.recompute."
            )
    lengths = {int(operator.outputs[0].shape[at].fixed) for operator, at in carried(graph).values()}
    outside = [other for other in graph if not any(_inside(other, operator) for operator in carriers)]
    if lengths and not any(is_cut(spec, n) for other in outside for spec in other.outputs for n in lengths):
        raise ConfigError(
            f"strategy.slices: no tensor between modules has its {sorted(lengths)} tokens in dimension {DIM}. Let the "
            "modules hand on [batch, tokens, ...]."
        )

    def hides(spec: TensorSpec) -> bool:
        return any(Affine(0, n) in spec.shape and not is_cut(spec, n) for n in lengths)

    ties = nx.Graph()
    for operator in carriers:
        ties.add_edges_from((operator.name, other.name) for other in graph if _inside(other, operator))
    clusters: dict[str, str] = {}
    for source, target, outputs in graph.nx.edges(data="outputs"):
        made = graph[source].target != "input" and graph[target].target != "step"
        if made and any(hides(graph[source].outputs[output]) for output in outputs):
            ties.add_edge(source, target)
    for operator in graph:
        if operator.cluster:
            ties.add_edge(operator.name, clusters.setdefault(operator.cluster, operator.name))
    names = {name: f"tokens{i}" for i, tied in enumerate(nx.connected_components(ties)) for name in tied}
    return graph.with_operators(replace(graph[name], cluster=cluster) for name, cluster in names.items())


def _inside(operator: Operator, carrier: Operator) -> bool:
    """True if an operator is in the module that contains the carrier; false if that is the model itself."""
    return bool(carrier.module) and f"{operator.module}.".startswith(f"{carrier.module}.")


def sliced(plan: Plan, graph: OperatorGraph, slicing: Slicing) -> Plan:
    """The plan with every stage sliced that can be.

    A stage can be sliced if it does not run the user's step, and all tensors that it sends have one index per token.
    Tensors that it receives are cut if they have one, and otherwise go to every slice.

    Raises:
        ConfigError: the model does not declare what it carries, or the slices do not fit it.
    """
    _check_modules(graph, slicing.modules or ())
    length, growing = sequence_length(graph), growing_share(graph, carried(graph))
    return _SliceCut(plan, graph, slicing, _intervals(slicing.slices, length, growing), length, growing).run()


def _check_modules(graph: OperatorGraph, paths: Iterable[str]) -> None:
    known = {operator.module for operator in graph}
    unknown = [path for path in paths if path and not any(f"{name}.".startswith(f"{path}.") for name in known)]
    if unknown:
        raise ConfigError(f"strategy.slice_modules lists {unknown}, which the training step does not call.")


def sequence_length(graph: OperatorGraph) -> int:
    """Number of tokens of a sample, along which the model carries.

    Raises:
        ConfigError: it does not declare what it carries, or has sequences of several lengths.
    """
    lengths = {int(operator.outputs[0].shape[dim].fixed) for operator, dim in carried(graph).values()}
    if not lengths:
        raise ConfigError(
            "strategy.slices cuts micro-batches along the sequence, and the model does not say what a token needs of "
            "those before it. Use lightning_gpp.sequence.causal_attention or carry in its modules "
            "(docs/howto/slicing.md)."
        )
    if len(lengths) > 1:
        raise ConfigError(
            f"strategy.slices: the model carries over sequences of {sorted(lengths)} tokens; slices are for models "
            "with one length. Pad the inputs to the same length."
        )
    return lengths.pop()


def _intervals(slices: int | Sequence[int], length: int, growing: float) -> list[tuple[int, int]]:
    if isinstance(slices, int):
        if slices > length:
            raise ConfigError(f"strategy.slices={slices} is more than the {length} tokens of a sample.")
        return equal_parts(slices, length, growing)
    stops = [sum(slices[: i + 1]) for i in range(len(slices))]
    if stops[-1] != length:
        raise ConfigError(
            f"strategy.slices={list(slices)} are {stops[-1]} tokens in total, a sample has {length}. Give the number "
            f"of slices: strategy.slices={len(slices)}."
        )
    return list(zip([0, *stops], stops, strict=False))


@dataclass(slots=True)
class _SliceCut:
    plan: Plan
    graph: OperatorGraph
    slicing: Slicing
    intervals: Sequence[tuple[int, int]]
    length: int
    growing: float
    assignment: Assignment = field(init=False)

    def __post_init__(self) -> None:
        self.assignment = assign(self.graph, [stage.modules for stage in self.plan.stages])

    def run(self) -> Plan:
        flows = crossing(self.graph, self.assignment)
        chosen = [stage for stage in range(len(self.plan.stages)) if self._can(stage, flows)]
        if not chosen:
            raise ConfigError(self._nothing())
        numbers: dict[int, list[int]] = {SOURCE: [SOURCE]}
        stages: list[Stage] = []
        for index, stage in enumerate(self.plan.stages):
            size = carried_bytes(self.graph, self.assignment, index)
            parts = self._parts(stage, size) if index in chosen else [stage]
            numbers[index] = list(range(len(stages), len(stages) + len(parts)))
            stages += parts
        edges = [new for edge in self.plan.edges for new in self._edges(edge, flows, numbers)]
        for index in chosen:
            edges += self._carrying(numbers[index], index)
        ordered = tuple(sorted(edges, key=lambda edge: (edge.src, edge.dst)))
        return replace(self.plan, stages=tuple(stages), edges=ordered)

    def _can(self, index: int, flows: Mapping[tuple[int, int], Sequence[ValueKey]]) -> bool:
        stage = self.plan.stages[index]
        if STEP in stage.modules or not self._wanted(stage) or self._has_other_sequences(index):
            return False
        sent = [value for (src, _), values in flows.items() if src == index for value in values]
        return bool(sent) and all(map(self._is_cut, sent))

    def _has_other_sequences(self, index: int) -> bool:
        """True if most of a stage's work is on other sequences: every slice would repeat it."""
        work = {True: 0.0, False: 0.0}
        for operator in self.graph:
            if index in self.assignment[operator.name]:
                work[operator.name in self.graph.whole] += operator.flops.at(1)
        return work[True] > work[False]

    def _wanted(self, stage: Stage) -> bool:
        names = self.slicing.modules
        if names is None:
            return True
        return all(any(f"{path}.".startswith(f"{name}.") or not name for name in names) for path in stage.modules)

    def _nothing(self) -> str:
        return (
            f"strategy.slices: no stage can be sliced along dimension {DIM} into slices of {self.length} tokens: each "
            "hands on tensors without it, runs the user's step, works mostly on another sequence, or has modules that "
            "are not in strategy.slice_modules. Leave out strategy.slices."
        )

    def _parts(self, stage: Stage, carried_bytes: Affine) -> list[Stage]:
        return [
            replace(
                stage,
                name=slice_name(stage.name, tokens),
                tokens=tokens,
                figures=_part(
                    stage.figures, tokens, self.length, cost_of(tokens, self.length, self.growing), carried_bytes
                ),
            )
            for tokens in self.intervals
        ]

    def _share(self, tokens: tuple[int, int]) -> float:
        return (tokens[1] - tokens[0]) / self.length

    def _edges(
        self, edge: Edge, flows: Mapping[tuple[int, int], Sequence[ValueKey]], numbers: Mapping[int, Sequence[int]]
    ) -> Iterator[Edge]:
        """The edge between slices of the same tokens; an unsliced stage has one to or from every slice."""
        above, below = numbers[edge.src], numbers[edge.dst]
        number = max(len(above), len(below))
        values = flows.get((edge.src, edge.dst), ())
        for part in range(number):
            share = self._share(self.intervals[part]) if number > 1 else 1.0
            yield replace(
                edge,
                src=above[part if len(above) > 1 else 0],
                dst=below[part if len(below) > 1 else 0],
                bytes=self._bytes(values, share) if number > 1 else edge.bytes,
                seconds=edge.seconds * share,
            )

    def _bytes(self, values: Iterable[ValueKey], share: float) -> Affine:
        sizes = (self._spec(value).affine_bytes * (share if self._is_cut(value) else 1) for value in values)
        return sum(sizes, Affine())

    def _is_cut(self, value: ValueKey) -> bool:
        """True if slices receive their own tokens of a tensor instead of all."""
        return value[0] not in self.graph.whole and is_cut(self._spec(value), self.length)

    def _carrying(self, parts: Sequence[int], index: int) -> Iterator[Edge]:
        """Edges from each slice to the next if the stage carries anything; they stay on the device and take no time."""
        specs = [spec for spec, _ in carried_by(self.graph, self.assignment, index)]
        size = sum((spec.affine_bytes for spec in specs), Affine())
        grad = any(spec.requires_grad for spec in specs)
        for number in range(len(parts) - 1 if specs else 0):
            share = self.intervals[number][1] / self.length
            yield Edge(src=parts[number], dst=parts[number + 1], bytes=size * share, differentiable=grad)

    def _spec(self, value: ValueKey) -> TensorSpec:
        return self.graph[value[0]].outputs[value[1]]


def sliced_costs(costs: StageCosts, plan: Plan, whole: Unsliced, graph: OperatorGraph) -> StageCosts:
    """Costs of a plan's slices, from those of its unsliced stages: bytes in proportion to the tokens, seconds growing
    with the position, as attention's do. The first slice has the parameters and the reduction of their gradients.
    """
    length, growing = sequence_length(graph), growing_share(graph, carried(graph))

    assignment = assign(graph, [stage.modules for stage in whole.plan.stages])
    sizes = [carried_bytes(graph, assignment, number) for number in range(len(whole.plan.stages))]

    def part(cost: Figures, index: int) -> Figures:
        tokens = plan.stages[index].tokens
        if tokens is None:
            return cost
        return _part(cost, tokens, length, cost_of(tokens, length, growing), sizes[whole.numbers[index]])

    firsts = [stage.tokens is None or not stage.tokens[0] for stage in plan.stages]
    return replace(
        costs,
        stages=tuple(part(costs.stages[number], index) for index, number in enumerate(whole.numbers)),
        replicas={
            (index, device): part(cost, index)
            for (number, device), cost in costs.replicas.items()
            for index in whole.parts(number)
        },
        all_reduce=tuple(
            costs.all_reduce[number] if firsts[index] else 0.0 for index, number in enumerate(whole.numbers)
        )
        if costs.all_reduce
        else (),
        ranks=tuple(costs.ranks[number] for number in whole.numbers) if costs.ranks else (),
    )


def _part(figures: Figures, tokens: tuple[int, int], length: int, work: float, carried_bytes: Affine) -> Figures:
    """The figures of a slice. The first one allocates the tensors carried for all tokens: its backward is the last."""
    share = (tokens[1] - tokens[0]) / length
    changes: dict[str, Any] = {name: part_of(name, getattr(figures, name), share, work) for name in COSTS}
    if tokens[0]:
        changes |= {"num_parameters": 0, "parameter_bytes": 0}
    else:
        kept = "working_bytes" if figures.working_bytes != Affine() else "activation_bytes"  # it keeps what it received
        changes[kept] += carried_bytes
    return replace(figures, **changes)


# -- tokens by their position -----------------------------------------------------------------------------------------
# Attention reads all earlier tokens, so later slices take longer. If a share q of the work grows with the number of
# earlier tokens, the first fraction x of a sequence takes (1 - q) x + q x^2 of the work. Slices of equal cost end where
# that is 1/n, 2/n ..., as in Seq1F1B (arXiv:2406.03488) and TeraPipe (arXiv:2102.07988).


def growing_share(graph: OperatorGraph, carriers: Iterable[str]) -> float:
    """Share of a model's FLOPs that read carried tensors, directly or through operators without arithmetic.

    Args:
        graph: the model's operators.
        carriers: names of the operators that carry.
    """
    found: set[str] = set()
    waiting = list(carriers)
    while waiting:
        for reader in graph.nx.successors(waiting.pop()):
            if reader not in found:
                found.add(reader)
                waiting += [] if graph[reader].flops.at(1) else [reader]
    total = sum(operator.flops.at(1) for operator in graph)
    return sum(graph[name].flops.at(1) for name in found) / total if total else 0.0


def equal_parts(number: int, length: int, growing: float) -> list[tuple[int, int]]:
    """Cut `length` tokens into slices of equal cost, of at least one token each.

    Args:
        number: number of slices; at most `length`.
        length: tokens of a sequence.
        growing: share of the work that grows with the number of earlier tokens.
    """
    stops = [0]
    for index in range(1, number + 1):
        wanted = round(length * _place(index / number, growing))
        stops.append(min(max(wanted, stops[-1] + 1), length - (number - index)))
    return list(zip(stops, stops[1:], strict=False))


def cost_of(tokens: tuple[int, int], length: int, growing: float) -> float:
    """The fraction of a sequence's work that these tokens take."""
    start, stop = (place / length for place in tokens)
    return (1 - growing) * (stop - start) + growing * (stop**2 - start**2)


def _place(part: float, growing: float) -> float:
    """The position in a sequence (0..1) before which a fraction (0..1) of its work is done."""
    if growing < 1e-9:
        return part
    rest = 1 - growing
    return (sqrt(rest * rest + 4 * growing * part) - rest) / (2 * growing)
