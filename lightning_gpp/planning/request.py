"""The request of a user, and the planning problem that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from lightning_gpp.cluster import Cluster
from lightning_gpp.costs.footprint import Footprint
from lightning_gpp.costs.model import CostModel
from lightning_gpp.costs.roofline import Roofline
from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning.assignment.micro_batches import resolve_size
from lightning_gpp.planning.assignment.slices import Slicing
from lightning_gpp.planning.problem.answer import Progress
from lightning_gpp.planning.problem.problem import Problem, operator_seconds
from lightning_gpp.planning.problem.search_options import SearchOptions
from lightning_gpp.planning.problem.units import find_units

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Into how many micro-batches a mini-batch may be cut where the user leaves it open."""

MORE_NUMBERS, MANY_STAGES = (384, 512, 768, 1024), 8
"""The same where only so small micro-batches leave a sample to each of the replicas of this many stages: where devices
have room for no more than one, fewer micro-batches would leave no choice but few stages with many replicas."""

MAX_SHORT = 0.05
"""The share of the mini-batch by which the last micro-batch may be shorter; searches neglect this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(SearchOptions):
    """A request for a plan: the limits of `SearchOptions`, and what else a search has to know.

    Args:
        cluster: the devices to use.
        batch_size: samples of the mini-batches of all pipelines together.
        schedules: names to choose from.
        model: fingerprint written into the plan.
        costs: seconds of operators; by default the roofline model.
        footprint: what a device keeps per byte of parameters.
        recompute: whether stages recompute their activations, or the names of those that do once they are known; None
            leaves it to the partitioner.
        slicing: how micro-batches are cut along the sequence; None: not at all.
        num_pieces: operators are grouped into modules of no more than 1 / `num_pieces` of the whole.
        chained: run the stages one after the other, even if they do not need each other.
        num_pipelines: pipeline replicas that share devices and mini-batch; None leaves it to the search.
        seconds: limit of all searches together, for partitioners that can stop at any time.
        progress: called during the search.
    """

    cluster: Cluster
    batch_size: int
    schedules: tuple[str, ...] = ("1f1b",)
    model: str = ""
    costs: CostModel | None = None
    footprint: Footprint = field(default_factory=Footprint)
    recompute: bool | tuple[str, ...] | None = None
    slicing: Slicing | None = None
    num_pieces: float = inf
    chained: bool = False
    num_pipelines: int | None = None
    seconds: float = 10.0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        SearchOptions.__post_init__(self)
        if self.batch_size < 1:
            raise ConfigError(f"A plan needs a mini-batch of at least 1 sample, got {self.batch_size}.")
        if not self.seconds > 0:
            raise ConfigError(f"strategy.search_seconds={self.seconds:g}; it must be more than 0 seconds.")
        resolve_size(self.batch_size, self.num_micro_batches, self.micro_batch_size, 1)

    @property
    def num_slices(self) -> int:
        """Slices of a micro-batch, as far as partitioners count them as micro-batches.

        Under 1F1B, slices hold no more activations than that many micro-batches. GPipe holds all, so its micro-batches
        stay as they are.
        """
        return 1 if self.slicing is None or self.schedules == ("gpipe",) else self.slicing.number

    def operator_costs(self, graph: OperatorGraph) -> CostModel:
        """The given cost model, or the roofline."""
        return self.costs or Roofline(graph)

    def problem(self, graph: OperatorGraph) -> Problem:
        """The same for all partitioners.

        Raises:
            ConfigError: the micro-batches do not fit the mini-batch.
        """
        costs, sizes = self.operator_costs(graph), self._sizes()
        seconds = operator_seconds(graph, costs, self.cluster, sizes[-1])
        return Problem(
            graph=graph,
            costs=costs,
            units=find_units(graph, num_pieces=self.num_pieces, seconds=seconds),
            cluster=self.cluster,
            batch_size=self.batch_size * self.num_slices,
            num_slices=self.num_slices,
            sizes=sizes,
            schedules=self.schedules,
            footprint=self.footprint,
            recompute=self.recompute if self.recompute is None or isinstance(self.recompute, bool) else False,
            max_replicas=inf if self.max_replicas is None else self.max_replicas,
            replicable=self.num_pipelines is None,
        )

    def _sizes(self) -> tuple[int, ...]:
        batch_size, number = self.batch_size * self.num_slices, self.num_micro_batches
        if number is None and self.micro_batch_size is None:
            return _sizes_to_try(batch_size, self.cluster.num_devices)
        number = None if number is None else number * self.num_slices
        return (resolve_size(batch_size, number, self.micro_batch_size, 1),)


def _sizes_to_try(batch_size: int, num_devices: int) -> tuple[int, ...]:
    """Micro-batch sizes for a search, ascending."""
    sizes = {-(-batch_size // number) for number in NUMBERS if number <= batch_size}
    smaller = {-(-batch_size // number) for number in MORE_NUMBERS if number <= batch_size}
    sizes |= {size for size in smaller if num_devices <= size * MANY_STAGES <= num_devices * MANY_STAGES}
    return tuple(sorted(size for size in sizes if -batch_size % size <= MAX_SHORT * batch_size))
