"""The request of a user, the candidates that it leaves open, and the planning problem of each.

A candidate is a schedule on a number of pipelines.

Partitioners know 1F1B and GPipe with one stage per device. For other schedules they look for stages that are balanced
under 1F1B. If the schedule has a layout of its own, the question has one device per stage, with its part of the memory:
a device runs several stages, or one replica each of two stages in a bidirectional schedule. Such layouts need every
device, so none may be idle.

Equal replicas of all stages are pipeline replicas, so a partitioner chooses the number of pipelines itself. If stages
may not have that many replicas, each number of pipelines is a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated, Final, Literal

from annotated_types import Ge

from lightning_gpp.cluster import DEVICES, Cluster
from lightning_gpp.costs.model import CostModel, Footprint
from lightning_gpp.costs.tensor_parallel import roofline_of
from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.option import option
from lightning_gpp.planning.assignment.complete import resolve_size
from lightning_gpp.planning.assignment.slices import Slicing
from lightning_gpp.planning.problem.problem import Problem, operator_seconds
from lightning_gpp.planning.problem.units import find_units
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.simulation import WeightCopies

Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The limits that the strategy and a request for a plan have in common; the strategy's options check them."""

    num_micro_batches: Count | None = option(
        None,
        "number of micro-batches into which a mini-batch is cut. Default: the partitioner's choice; with stages by "
        "hand twice the number of stages on the longest path, but at most one per sample.",
        section="Micro-batches, and limits of plans",
    )
    micro_batch_size: Count | None = option(None, "samples of a micro-batch, instead of num_micro_batches.")
    max_replicas: Count | None = option(
        None, "number of devices that may share one stage; 1 puts every stage on one device. Default: any number."
    )
    idle_devices: bool | None = option(
        None,
        "true: plans may leave devices idle, because fewer are faster or just as fast. false: every device gets a "
        "stage. Default: true, but false for processes "
        "on a CPU, where pipelines are tried out.",
    )
    simplicity: Annotated[float, Ge(0)] = option(
        0.02,
        "share of the step time by which a plan with fewer stages may be slower than the fastest one found.",
        allowed="0 or more",
    )
    stages_per_device: Count | None = option(
        None, "number of stages on every device. Default: the number that the schedule is made for."
    )
    sharding: Literal["none", "auto", "zero1", "fsdp"] = option(
        "none",
        "what the ranks that hold the same stage split among them, besides the samples: zero1 splits the optimizer's "
        "state, fsdp also parameters and gradients, auto what a search needs for the memory, none keeps what the plan "
        "says. A search counts what is split, so it may give stages more replicas.",
    )


NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of micro-batches that a search tries if the user leaves them open."""

MORE_NUMBERS, MANY_STAGES = (384, 512, 768, 1024), 8
"""More such numbers, tried if a micro-batch has at most one sample per device, but one for each replica of this many
stages: if devices have memory for only one sample, fewer micro-batches would force few stages with many replicas.
"""

MAX_SHORT = 0.05
"""The share of the mini-batch by which the last micro-batch may be shorter; searches ignore the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(SearchOptions):
    """A request for a plan: the limits of `SearchOptions`, and the rest that a search has to know.

    Args:
        cluster: the devices to use.
        batch_size: samples of the mini-batches of all pipelines together.
        schedules: names of schedules to choose from.
        model: fingerprint written into the plan.
        costs: seconds of operators; by default the roofline model.
        footprint: what a device keeps per byte of parameters; without training, only forwards are planned.
        recompute: whether stages recompute their activations, or names of the stages that do; None leaves it to the
            partitioner.
        offload: whether stages keep activations in host memory, or names of the stages that do; "auto": those that
            would not fit otherwise, where this takes less time than recomputation. None: none.
        slicing: how micro-batches are cut along the sequence; None for unsliced stages.
        num_pieces: modules are divided until none costs more than 1 / `num_pieces` of the model.
        chained: run the stages one after the other, even if they do not need each other.
        weight_copies: copies of a stage's weights by its delay, if the pipeline does not flush, so that plans are
            judged by their period instead of their step; None: it flushes.
        num_pipelines: pipeline replicas that share devices and mini-batch; None leaves it to the search.
        num_copies: pipelines besides which this one is planned, and whose stages hold the same parameters.
        slack: whether stages may have more micro-batches in flight than 1F1B's rule.
        every_device: whether the schedule's layout needs a stage on every device.
        seconds: time limit of all searches together, for partitioners that can stop at any time; see `SearchControl`.
    """

    cluster: Cluster
    batch_size: int
    schedules: tuple[str, ...] = ("1f1b",)
    model: str = ""
    costs: CostModel | None = None
    footprint: Footprint = field(default_factory=Footprint)
    recompute: bool | tuple[str, ...] | None = None
    offload: bool | tuple[str, ...] | str | None = None
    slicing: Slicing | None = None
    num_pieces: float = inf
    chained: bool = False
    weight_copies: WeightCopies | None = None
    num_pipelines: int | None = None
    num_copies: int = 1
    slack: bool = True
    every_device: bool = False
    seconds: float = 40.0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"A plan needs a mini-batch of at least 1 sample, got {self.batch_size}.")
        if not self.seconds > 0:
            raise ConfigError(f"strategy.search_seconds={self.seconds:g}; it must be more than 0 seconds.")
        resolve_size(self.batch_size, self.num_micro_batches, self.micro_batch_size, 1)

    @property
    def continuous(self) -> bool:
        """True if the pipeline does not flush."""
        return self.weight_copies is not None

    @property
    def may_idle(self) -> bool:
        """True if a plan may leave devices idle."""
        if self.idle_devices is not None:
            return self.idle_devices
        return all(device.name != DEVICES["cpu"].name for device in self.cluster.devices)

    @property
    def num_slices(self) -> int:
        """Slices per micro-batch that partitioners count as micro-batches.

        Under 1F1B, slices in flight hold no more activations than as many micro-batches of their size would. GPipe
        holds all, so its micro-batches count unsliced.
        """
        return 1 if self.slicing is None or self.schedules == ("gpipe",) else self.slicing.number

    def operator_costs(self, graph: OperatorGraph) -> CostModel:
        """The given cost model, or the roofline."""
        return self.costs or roofline_of(graph)

    def problem(self, graph: OperatorGraph) -> Problem:
        """The planning problem of the request, the same for all partitioners.

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
            offload=None if self.offload == "auto" else self.offload is True,
            sharding=self.sharding,
            num_pipelines=self.num_copies,
            max_replicas=inf if self.max_replicas is None else self.max_replicas,
            replicable=self.num_pipelines is None,
            weight_copies=self.weight_copies,
            idle_devices=self.may_idle,
            every_device=self.every_device,
            slack=self.slack,
            simplicity=self.simplicity,
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
    more = (*MORE_NUMBERS, min(batch_size, MORE_NUMBERS[-1]))  # also single samples
    smaller = {-(-batch_size // number) for number in more if number <= batch_size}
    sizes |= {size for size in smaller if num_devices <= size * MANY_STAGES <= num_devices * MANY_STAGES}
    shared = {-(-size // num_devices) * num_devices for size in sizes}  # all devices get equally many samples
    counts = (base << shift for base in (1, 3) for shift in range(num_devices.bit_length()))
    shared |= {count for count in counts if min(sizes) < count <= num_devices < 2 * count}  # or most of them do
    sizes |= {size for size in shared if batch_size % size == 0}
    return tuple(sorted(size for size in sizes if -batch_size % size <= MAX_SHORT * batch_size))


SEARCHED: Final = ("1f1b", "gpipe")
"""Schedules for which partitioners search."""

STANDARD: Final = "1f1b"
"""The schedule for which they search if the wanted one is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule on a number of pipelines.

    Args:
        request: the user's request.
        schedule: its name.
        num_pipelines: pipeline replicas; None leaves their number to the partitioner.
    """

    request: Request
    schedule: str
    num_pipelines: int | None

    @property
    def num_devices(self) -> int:
        """Number of devices of one pipeline; the most that the partitioner may use."""
        return self.request.cluster.num_devices // (self.num_pipelines or 1)

    @property
    def has_own_layout(self) -> bool:
        """True if the draft has one device per stage and has to be laid out."""
        return has_own_layout(self.request, self.schedule)

    def question(self) -> Request:
        """The request for one pipeline that a partitioner gets; candidates with the same question share a search.

        Raises:
            ConfigError: the mini-batch of one pipeline does not give the wanted micro-batches.
        """
        request, own_layout = self.request, self.has_own_layout
        return replace(
            request,
            cluster=self._one_device_per_stage() if own_layout else self._cluster(),
            batch_size=request.batch_size // (self.num_pipelines or 1),
            num_pipelines=self.num_pipelines and 1,
            num_copies=self.num_pipelines or 1,
            schedules=(self.schedule if self.schedule in SEARCHED else STANDARD,),
            max_replicas=1 if own_layout else request.max_replicas,
            idle_devices=request.may_idle and not own_layout,
            every_device=own_layout,
            slack=self.schedule in SEARCHED,  # others order micro-batches by rules of their own
            stages_per_device=None,
            sharding="none" if own_layout and request.sharding == "fsdp" else request.sharding,
            chained=False,
        )

    def _cluster(self) -> Cluster:
        cluster = self.request.cluster
        return cluster if self.num_devices == cluster.num_devices else cluster.subset(range(self.num_devices))

    def _one_device_per_stage(self) -> Cluster:
        """A cluster with one device per stage, each with the memory of one stage."""
        number = num_stages_per_device(self.request, self.schedule)
        directions = 1 + method_of(self.schedule).bidirectional
        return self._cluster().repeated(number, memory_parts=number * directions)


def candidates(request: Request, schedule: str) -> list[Candidate]:
    """The candidates with one of the request's schedules, fewest pipelines first.

    Raises:
        ConfigError: the request allows replicas of stages, and the schedule does not.
    """
    if has_own_layout(request, schedule):
        check_replicas(schedule, request.max_replicas)
    numbers = _numbers(request, schedule)
    return [Candidate(request=request, schedule=schedule, num_pipelines=number) for number in numbers]


def num_stages_per_device(request: Request, schedule: str) -> int:
    """The user's number, or else the schedule's."""
    return request.stages_per_device or method_of(schedule).stages_per_device


def has_own_layout(request: Request, schedule: str) -> bool:
    """True if the schedule needs a layout that partitioners do not produce."""
    return num_stages_per_device(request, schedule) > 1 or method_of(schedule).bidirectional


def check_replicas(schedule: str, max_replicas: int | None) -> None:
    """Refuse replicas of stages for a schedule with a layout of its own, which has one device per stage.

    Raises:
        ConfigError: more than one replica is allowed.
    """
    if max_replicas is not None and max_replicas > 1:
        raise ConfigError(
            f"strategy.schedule={schedule!r} puts every stage on one device of a pipeline, "
            f"strategy.max_replicas={max_replicas} allows more. Leave max_replicas out, and use strategy.num_pipelines "
            "for data parallelism."
        )


def _numbers(request: Request, schedule: str) -> Iterator[int | None]:
    """Numbers of pipelines to try; None leaves the number to the partitioner."""
    devices = request.cluster.num_devices
    if request.num_pipelines is not None:
        yield request.num_pipelines
    elif not has_own_layout(request, schedule) and (request.max_replicas or devices) >= devices:
        yield None
    else:
        yield from (n for n in range(1, devices + 1) if devices % n == 0 and request.batch_size % n == 0)
