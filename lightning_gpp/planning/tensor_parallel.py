"""The search for the numbers of processes that share the work inside stages (tensor parallelism).

    for each number, for all stages          the search for groups of that many devices (`PlanSearch`)
    single stages with other numbers         from the drafts of these, if the partitioner is `auto`
    keep the plan that fits and has the highest throughput

So the answer is never slower than the best of the plans with one number. All searches together take the time of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from lightning_gpp.cluster.groups import fits_node, grouped
from lightning_gpp.costs.model import CostModel, ForwardOnly
from lightning_gpp.costs.tensor_parallel import roofline_of
from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.graph.parts import part_of
from lightning_gpp.planning.partitioners.auto.search import INTERRUPTED, Search
from lightning_gpp.planning.partitioners.auto.shape import Shape
from lightning_gpp.planning.problem.draft import Draft, DraftStage
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl
from lightning_gpp.planning.problem.prediction import Prediction
from lightning_gpp.planning.problem.problem import Problem, busy_bound
from lightning_gpp.planning.problem.units import Unit
from lightning_gpp.planning.request import Request, has_own_layout
from lightning_gpp.planning.search import PlanSearch

SIZES: Final = (1, 2, 4, 8)
"""Numbers of processes per device that are compared, and that stages of one plan may have."""

MIXED_SHARE: Final = 0.4
"""Share of the time for the search with different numbers."""

IMPROVED: Final = "auto"
"""The partitioner whose drafts get different numbers; others are published algorithms, which do not know of groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesFound:
    """The best plan of all, and what was found for each number of processes per device.

    Args:
        prediction: the best plan. Its lower bound is one for all of these numbers, and for any mixture of them.
        plans: the best plan with each number for all stages.
        mixed: the best plan with different numbers that was found; None if there is none.
        failures: the reasons why there is no plan with a number.
    """

    prediction: Prediction
    plans: Mapping[int, Prediction]
    mixed: Prediction | None = None
    failures: Mapping[int, GPPError] = field(default_factory=dict)


def best_sizes(
    partitioner: str, request: Request, graphs: Mapping[int, OperatorGraph], models: Mapping[int, str] = {}
) -> SizesFound:
    """The fastest plan that fits the memory, with the best number of processes per device for every stage.

    Args:
        partitioner: its name.
        request: the question for single devices.
        graphs: for each number the undivided graph, which says what members divide (`OperatorGraph.divided`), and does
            not cut where they do. For one process it may be cut everywhere.
        models: fingerprints of the graphs, which are written into plans; by default that of the request.

    Raises:
        GPPError: there is no plan with any number; the error is that of the first.
    """
    return _Sizes(partitioner, request, graphs, models).found()


class _Sizes:
    """The searches of one request."""

    def __init__(
        self, partitioner: str, request: Request, graphs: Mapping[int, OperatorGraph], models: Mapping[int, str]
    ) -> None:
        self.name, self.request, self.graphs, self.models = partitioner, request, graphs, models
        self.searches: dict[int, PlanSearch] = {}
        self.plans: dict[int, Prediction] = {}
        self.failures: dict[int, GPPError] = {}

    def found(self) -> SizesFound:
        """See `best_sizes`."""
        for number in self.graphs:
            self._search(number)
        mixed = self._mixed()
        if not self.plans and mixed is None:
            raise self._explanation()
        plans = [*self.plans.values(), *([mixed] if mixed is not None else [])]
        best = min(plans, key=lambda plan: plan.rank)
        best = replace(best, lower_bound=self._lower_bound())
        return SizesFound(prediction=best, plans=self.plans, mixed=mixed, failures=self.failures)

    def _search(self, number: int) -> None:
        """Search with groups of one size."""
        try:
            search = PlanSearch(self.name, part_of(self.graphs[number], number), self._question(number))
        except GPPError as error:
            self.failures[number] = error
            return
        self.searches[number], found = search, search.found()
        if isinstance(found, GPPError):
            self.failures[number] = found
        else:
            self.plans[number] = found

    def _explanation(self) -> GPPError:
        number, error = next(iter(self.failures.items()))
        return self.searches[number].explanation(error) if number in self.searches else error

    def _question(self, number: int) -> Request:
        cluster = self.request.cluster
        heads = range(0, cluster.num_devices, number)
        if not all(fits_node(cluster, head, number) for head in heads):
            raise ConfigError(f"The {number} processes of a device would be on several nodes.")
        return replace(
            self.request,
            cluster=grouped(cluster, (number,) * len(heads)),
            model=self.models.get(number, self.request.model),
            costs=self.request.costs if number == 1 else self._costs(number),
            seconds=(1 - MIXED_SHARE) * self.request.seconds / len(self.graphs),
        )

    def _costs(self, number: int) -> CostModel:
        costs = roofline_of(self.graphs[number])
        return costs if self.request.footprint.training else ForwardOnly(costs)

    # -- different numbers --------------------------------------------------------------------------------------------

    @cached_property
    def _mixed_request(self) -> tuple[OperatorGraph, Request] | None:
        """The question for stages with different numbers; None if schedules or the partitioner do not know of them.

        Their graphs have to be cut alike.
        """
        request, numbers = self.request, [number for number in self.graphs if number > 1]
        schedules = tuple(name for name in request.schedules if not has_own_layout(request, name))
        if not numbers or not schedules or self.name != IMPROVED:
            return None
        graph = self.graphs[numbers[0]]
        alike = [number for number in numbers if _cut_alike(graph, self.graphs[number])]
        seconds = MIXED_SHARE * request.seconds
        question = replace(request, schedules=schedules, costs=self._costs(numbers[0]), seconds=seconds)
        model = self.models.get(numbers[0], request.model)
        return graph, replace(question, members=tuple(sorted({1, *alike})), model=model)

    def _mixed(self) -> Prediction | None:
        """The best plan in which stages have different numbers of processes per device; None if none fits."""
        interrupted = any(plan.search is not None and plan.search.interrupted for plan in self.plans.values())
        if self._mixed_request is None or interrupted:
            return None
        search = PlanSearch(self.name, *self._mixed_request, partitioner=self._improved)
        found = search.found()
        return None if isinstance(found, GPPError) else found

    def _improved(self, problem: Problem, control: SearchControl) -> Answer:
        """The answer of the search that begins with the drafts for single numbers."""
        drafts = dict(reversed([*self._drafts(problem)]))  # of equal ones the first, which may have a name
        sizes = {*problem.sizes, *(stage.micro_batch_size for draft in drafts for stage in draft.stages)}
        return auto_with_members(replace(problem, sizes=tuple(sorted(sizes))), control, drafts)

    def _drafts(self, problem: Problem) -> Iterator[tuple[Draft, str]]:
        """The drafts for single numbers that answer the same question; the best with each number has a name."""
        for number, search in self.searches.items():
            name = f"strategy.tensor_parallel_size={number}"
            for source, draft in search.drafts():
                same = source.num_pipelines == problem.num_pipelines and draft.schedule in problem.schedules
                if same and source.num_devices * number == problem.num_devices and not source.every_device:
                    translated = with_groups(source, draft, number, problem)
                    if translated is not None:
                        yield translated, name
                        name = ""

    def _lower_bound(self) -> float:
        bounds = [plan.lower_bound for plan in self.plans.values()]
        if self._mixed_request is not None:
            graph, request = self._mixed_request
            bounds.append(busy_bound(request.problem(graph)))
        return min(bounds)


def _cut_alike(graph: OperatorGraph, other: OperatorGraph) -> bool:
    return list(graph.nx.nodes) == list(other.nx.nodes) and graph.divided == other.divided


def auto_with_members(problem: Problem, control: SearchControl, drafts: Mapping[Draft, str]) -> Answer:
    """Improve drafts for this problem; without any, as `auto` for single devices.

    `drafts`: with the names under which they are alternatives in any case, whatever their estimates; empty: none.
    """
    search = Search(problem, control, busy_bound(problem))
    try:
        shapes = {shape: name for draft, name in drafts.items() if (shape := Shape.of(draft)) is not None}
        search.named = {shape: name for shape, name in shapes.items() if name}
        search.take(shapes)
        search.run(search.leaders())
        search.simplify()
        search.save()
        return search.answer()
    except KeyboardInterrupt:
        return replace(search.answer(), notes=(INTERRUPTED,), interrupted=True)


def with_groups(source: Problem, draft: Draft, number: int, target: Problem) -> Draft | None:
    """A draft for groups of `number` devices, in terms of a problem with their members as devices.

    Units of the two problems may be cut differently: each goes where most of it is. None if that leaves a stage empty.
    """
    stage_of = {unit: index for index, stage in enumerate(draft.stages) for unit in stage.units}
    seconds = source.seconds(draft.stages[0].micro_batch_size).total.tolist()
    units: list[list[int]] = [[] for _ in draft.stages]
    for index, unit in enumerate(target.units.units):
        shares = [0.0 for _ in draft.stages]
        for other in _alike(source.units.units, unit):
            shares[stage_of[other]] += seconds[other] + 1e-12
        units[shares.index(max(shares))].append(index)
    if not all(units):
        return None
    pairs = zip(draft.stages, units, strict=True)
    return replace(draft, stages=tuple(_with_group(stage, tuple(own), number) for stage, own in pairs), sharding=None)


def _with_group(stage: DraftStage, units: tuple[int, ...], number: int) -> DraftStage:
    devices = tuple(number * device for device in stage.devices)
    return replace(stage, units=units, devices=devices, members=number, recompute=None, offload=False)


def _alike(units: Sequence[Unit], wanted: Unit) -> list[int]:
    """The units with modules in common with another one, by their paths."""
    return [
        index
        for index, unit in enumerate(units)
        if any(_is_inside(own, path) or _is_inside(path, own) for own in unit.modules for path in wanted.modules)
    ]


def _is_inside(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")
