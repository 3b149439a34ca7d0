"""Assigns operators to stages by module paths, finds what flows between stages, and builds the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import networkx as nx

from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine, Operator, OperatorGraph, TensorSpec
from lightning_gpp.plan import SOURCE, STEP, Edge, Plan, Stage, topological
from lightning_gpp.planning.assignment.modules import DATA, ModuleNode, figures_of, module_tree

Assignment = dict[str, tuple[int, ...]]
"""The stages that compute each operator. Cheap glue that several stages read is computed in each of them."""


def assign(graph: OperatorGraph, stage_modules: Sequence[Sequence[str]]) -> Assignment:
    """Give every operator to the stage that lists the longest prefix of its module path, and place the glue.

    Glue is the operators outside all listed modules. Its assignment never makes a stage wait for another that it does
    not need anyway, so that branches stay independent:

    * read by one stage: it goes there, or to the stage that makes all it reads if that sends fewer bytes;
    * read by several, while one stage makes or waits for all that it reads: it goes to that stage (residual sums);
    * read by several, and reading data or several branches (masks): each reader computes it for itself. Operators that
      draw random numbers, use parameters, or belong to a cluster are never repeated: the first reader computes them.

    Raises:
        PlanError: a module is listed twice.
    """
    graph = graph.model or graph
    key = len(graph), tuple(map(tuple, stage_modules))
    if key not in graph.assigned:  # a plan that is drafted, completed and timed is assigned several times
        if len(graph.assigned) >= _REMEMBERED:
            graph.assigned.clear()
        graph.assigned[key] = _assigned(graph, stage_modules)
    return dict(graph.assigned[key])


_REMEMBERED: Final = 16


def _assigned(graph: OperatorGraph, stage_modules: Sequence[Sequence[str]]) -> Assignment:
    placed = _Assignment(graph, owners_of(stage_modules))
    for operator in reversed(list(graph)):
        placed.place(operator)
    _place_effects(graph, placed.assignment)
    return placed.assignment


def _place_effects(graph: OperatorGraph, assignment: Assignment) -> None:
    """Assign operators that only update a buffer, which have no reader, to the stage of the buffer or their inputs."""
    homes: dict[str, tuple[int, ...]] = {}
    for operator in graph:
        if operator.target != "input":
            homes.update(dict.fromkeys(operator.buffers, assignment[operator.name][:1]))
    for operator in reversed(list(graph)):
        if operator.buffers and not assignment[operator.name]:
            ancestors = nx.ancestors(graph.nx, operator.name)
            home = _home(graph, assignment, [homes[name] for name in operator.buffers], ancestors)
            homes.update(dict.fromkeys(operator.buffers, home))
            for name in (operator.name, *(a for a in ancestors if not assignment[a])):
                assignment[name] = home


def _home(
    graph: OperatorGraph, assignment: Assignment, homes: list[tuple[int, ...]], ancestors: set[str]
) -> tuple[int, ...]:
    makers = [assignment[operator.name][:1] for operator in graph if operator.name in ancestors]
    sinks = [assignment[operator.name] for operator in graph if operator.target == "step"]
    anywhere = (0,)  # a slice of a buffer that nothing reads, where no stage runs the step yet
    candidates = [*homes, *(maker for maker in reversed(makers) if maker != (SOURCE,)), *sinks, anywhere]
    return next(stages for stages in candidates if stages)


def forced(graph: OperatorGraph, stage_modules: Sequence[Sequence[str]]) -> set[tuple[int, int]]:
    """Pairs of stages, without SOURCE, of which the second reads a result of the first, directly or through glue."""
    owners = _owned(graph, owners_of(stage_modules))
    return _forced(graph, owners, _makers(graph, owners))


def owners_of(stage_modules: Sequence[Sequence[str]]) -> dict[str, int]:
    """The stage that lists each module.

    Raises:
        PlanError: a module is listed twice.
    """
    owners: dict[str, int] = {}
    for index, modules in enumerate(stage_modules):
        for module in modules:
            if module in owners:
                raise PlanError(
                    f"Module {module!r} is listed twice, by stages {owners[module]} and {index} (strategy.stages, "
                    "strategy.plan). A module belongs to one stage; list its submodules to divide it."
                )
            owners[module] = index
    return owners


def owner_of(module: str, owners: dict[str, int]) -> int | None:
    """The value of the longest prefix (in whole path parts) of `module` among `owners`."""
    while module not in owners:
        if not module or module in (STEP, DATA):
            return None
        module = module.rpartition(".")[0]
    return owners[module]


def step_owner(graph: OperatorGraph, modules: Sequence[Sequence[str]]) -> int:
    """The stage that the user's step joins by default: of those without successors, the one that sends it most."""
    step = len(modules)
    values = crossing(graph, assign(graph, [*modules, (STEP,)]))
    followed = {src for src, dst in values if dst != step}
    received = {src: _bytes(graph, flow) for (src, dst), flow in values.items() if dst == step and src != SOURCE}
    candidates = {src: size for src, size in received.items() if src not in followed}
    return max(candidates, key=lambda src: (candidates[src], src), default=step - 1)


def _bytes(graph: OperatorGraph, values: Iterable[tuple[str, int]]) -> int:
    return sum(graph[name].outputs[output].bytes(1) for name, output in values)


def _owned(graph: OperatorGraph, owners: dict[str, int]) -> dict[str, int]:
    """The stage of every operator in a listed module, or in one cluster with such an operator."""
    owned: dict[str, int] = {}
    clusters: dict[str, int] = {}
    for operator in graph:
        owner = owner_of(operator.module, owners)
        if owner is not None and operator.target != "input":
            owned[operator.name] = owner
            clusters[operator.cluster] = owner
    tied = (operator for operator in graph if operator.cluster and operator.cluster in clusters)
    return owned | {operator.name: clusters[operator.cluster] for operator in tied}


def _makers(graph: OperatorGraph, owned: dict[str, int]) -> dict[str, frozenset[int]]:
    """The stages whose modules make the inputs of each operator, directly or through glue.

    A stage is left out if another of them is known to wait for it: for a residual stream, only the last maker remains.
    """
    makers: dict[str, frozenset[int]] = {}
    for operator in graph:
        found: set[int] = set()
        waited: set[int] = set()
        for source in graph.nx.predecessors(operator.name):
            found |= {owned[source]} if source in owned else makers[source]
            waited |= makers[source] - {owned[source]} if source in owned else set()
        makers[operator.name] = frozenset(found - waited)
    return makers


def _forced(graph: OperatorGraph, owned: dict[str, int], makers: dict[str, frozenset[int]]) -> set[tuple[int, int]]:
    return {(maker, stage) for name, stage in owned.items() for maker in makers[name] if maker != stage}


class _Assignment:
    """The stages of operators, filled from the last operator to the first."""

    def __init__(self, graph: OperatorGraph, owners: dict[str, int]) -> None:
        self.graph = graph
        self.owned = _owned(graph, owners)
        self.makers = _makers(graph, self.owned)
        order = nx.DiGraph(sorted(_forced(graph, self.owned, self.makers)))
        self.ancestors = {stage: nx.ancestors(order, stage) for stage in order}
        self.clusters: dict[str, tuple[int, ...]] = {}
        self.assignment: Assignment = {}

    def place(self, operator: Operator) -> None:
        stages = self.clusters.get(operator.cluster) or self._stages_of(operator)
        if operator.cluster and stages:
            self.clusters[operator.cluster] = stages
        self.assignment[operator.name] = stages

    def _stages_of(self, operator: Operator) -> tuple[int, ...]:
        if operator.target == "input":
            return (SOURCE,)
        if operator.name in self.owned:
            return (self.owned[operator.name],)
        readers = sorted({stage for name in self.graph.nx.successors(operator.name) for stage in self.assignment[name]})
        last = self._last_maker(operator)
        if last is not None and (len(readers) > 1 or (readers and self._shrinks(operator))):
            return (last,)
        return tuple(readers) if _may_repeat(operator) else tuple(readers[:1])

    def _last_maker(self, operator: Operator) -> int | None:
        """The stage that makes an input of the operator and waits for all others that do; None if there is none."""
        makers = self.makers[operator.name]
        last = [stage for stage in makers if makers - {stage} <= self.ancestors.get(stage, set())]
        return last[0] if len(last) == 1 else None

    def _shrinks(self, operator: Operator) -> bool:
        """True if an operator produces fewer bytes than it reads; inputs from the data do not count.

        Gradients do: behind a `detach`, none are sent back.
        """
        edges = self.graph.nx.in_edges(operator.name, data="outputs")
        read = [(self.graph[source], outputs) for source, _, outputs in edges if self.graph[source].target != "input"]
        size = sum(_sent(source.outputs[output]) for source, outputs in read for output in outputs)
        return bool(sum(map(_sent, operator.outputs)) < size)


def _sent(spec: TensorSpec) -> int:
    """Bytes that a value and its gradient take on their way, for one sample."""
    return spec.bytes(1) * (1 + spec.requires_grad)


def _may_repeat(operator: Operator) -> bool:
    return not (operator.parameters or operator.buffers or operator.random or operator.cluster)


def crossing(graph: OperatorGraph, assignment: Assignment) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """The values `(operator, output)` that flow along each edge of the stage graph, in recorded order."""
    values: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for operator in graph:
        for _, target, outputs in graph.nx.out_edges(operator.name, data="outputs"):
            for stage in assignment[target]:
                if stage in assignment[operator.name]:
                    continue
                flow = values.setdefault((assignment[operator.name][0], stage), [])
                flow.extend((operator.name, output) for output in outputs if (operator.name, output) not in flow)
    return values


def make_plan(
    graph: OperatorGraph,
    stages: Sequence[Stage],
    *,
    batch_size: int,
    schedule: str = "1f1b",
    model: str = "",
    unused: tuple[int, ...] = (),
) -> Plan:
    """Make a plan of stages: edges, bytes and figures come from the graph, stages are in topological order.

    Raises:
        PlanError: the stages form a cycle, they contradict themselves, or replicas would share what cannot be
            shared.
    """
    order = _order(stages, sorted(forced(graph, [stage.modules for stage in stages])))
    stages = [stages[index] for index in order]
    assignment = assign(graph, [stage.modules for stage in stages])
    _check_replicas(graph, stages, assignment)
    edges = tuple(_edge(graph, pair, values) for pair, values in sorted(crossing(graph, assignment).items()))
    figures = figures_of(graph, assignment, stages, edges)
    complete = tuple(replace(stage, figures=figures[index]) for index, stage in enumerate(stages))
    return Plan(stages=complete, edges=edges, batch_size=batch_size, schedule=schedule, model=model, unused=unused)


def _order(stages: Sequence[Stage], pairs: list[tuple[int, int]]) -> list[int]:
    order = topological(pairs, len(stages))
    if not order:
        cycle = [src for src, _ in nx.find_cycle(nx.DiGraph(pairs))]
        names = " -> ".join(stages[index].name for index in [*cycle, cycle[0]])
        raise PlanError(
            f"The stages form a cycle: {names}. Each needs a result of the next, so none can start. Merge these stages "
            "(strategy.stages)."
        )
    return order


def mixing_stages(graph: OperatorGraph, assignment: Assignment) -> dict[int, Operator]:
    """The first operator of each stage that combines all samples of a micro-batch; stages without one are left out."""
    first: dict[int, Operator] = {}
    for operator in graph:
        if operator.target != "step" and any(spec.mixes_samples for spec in operator.outputs):
            for stage in assignment[operator.name]:
                first.setdefault(stage, operator)
    return first


def mixes_into_samples(graph: OperatorGraph) -> bool:
    """True if values of single samples depend on all of them, because the network reads a value that mixes samples.

    Rows that other samples point at (edges of a graph) are such values, too; a loss that only the step reads is not.
    """
    reads = (
        graph[target]
        for source, target, outputs in graph.nx.edges(data="outputs")
        if any(graph[source].outputs[output].mixes_samples for output in outputs)
    )
    return any(spec.varies for reader in reads if reader.target != "step" for spec in reader.outputs)


def _check_replicas(graph: OperatorGraph, stages: Sequence[Stage], assignment: Assignment) -> None:
    for index, operator in mixing_stages(graph, assignment).items():
        stage = stages[index] if index != SOURCE else None
        if stage is None or len(stage.devices) == 1 or stage.round_robin:
            continue
        where = f" ({operator.line})" if operator.line else ""
        raise PlanError(
            f"Stage {stage.name!r} has {len(stage.devices)} replicas that share each micro-batch, but "
            f"{operator.target} in module {operator.module or 'the root module'!r}{where} combines all samples of a "
            "micro-batch, as a loss or a mean does: each replica would combine its own share only. Give the stage one "
            "device, let its replicas take micro-batches in turn (round_robin: true), or compute that value in the "
            "training step (strategy.stages, strategy.plan)."
        )


def _edge(graph: OperatorGraph, pair: tuple[int, int], values: list[tuple[str, int]]) -> Edge:
    specs = [graph[name].outputs[output] for name, output in values]
    return Edge(
        src=pair[0],
        dst=pair[1],
        bytes=sum((spec.affine_bytes for spec in specs), Affine()),
        differentiable=any(spec.requires_grad for spec in specs),
        sliceable=all(spec.divisible for spec in specs),
    )


def compress(graph: OperatorGraph, stage_modules: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The same stages with the fewest paths: a module replaces its submodules if the stage computes all of it."""
    assignment = assign(graph, stage_modules)
    found: list[list[str]] = [[] for _ in stage_modules]
    for path, stage in _collected(module_tree(graph), assignment)[1]:
        found[stage].append(path)
    step = next(index for index, modules in enumerate(stage_modules) if STEP in modules)
    found[step].append(STEP)
    return [tuple(paths) for paths in found]


def _collected(node: ModuleNode, assignment: Assignment) -> tuple[set[tuple[int, ...]], list[tuple[str, int]]]:
    """The stages of the operators in a module, and the largest modules inside that are on one stage, with that."""
    inside = [_collected(child, assignment) for child in node.children.values()]
    stages = set().union({assignment[operator.name] for operator in node.operators}, *(found for found, _ in inside))
    if len(stages) == 1 and len(only := next(iter(stages))) == 1:
        return stages, [(node.path, only[0])]
    return stages, [entry for _, entries in inside for entry in entries]
