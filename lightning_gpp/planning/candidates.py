"""The candidates of a request: every schedule on every number of pipelines, and the question a partitioner gets.

Partitioners know 1F1B and GPipe with one stage per device. For other schedules they are asked for stages that are
balanced under 1F1B. If the schedule has a layout of its own, the question has one device per stage: several stages of a
device share its memory, and so do the two replicas of a stage in a bidirectional schedule.

Equal replicas of all stages are pipeline replicas, so a partitioner chooses the number of pipelines itself. If stages
may not have that many replicas, each number of pipelines is a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from lightning_gpp.cluster import Cluster
from lightning_gpp.errors import ConfigError
from lightning_gpp.planning.request import Request
from lightning_gpp.schedules.registry import method_of

SEARCHED: Final = ("1f1b", "gpipe")
"""Schedules that partitioners know."""

STANDARD: Final = "1f1b"
"""The schedule for which they balance stages if they do not know the wanted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule on a number of pipelines.

    Args:
        request: what the user wants.
        schedule: name.
        num_pipelines: pipeline replicas; None leaves their number to the partitioner.
    """

    request: Request
    schedule: str
    num_pipelines: int | None

    @property
    def num_devices(self) -> int:
        """Devices of one pipeline, as many as the partitioner may use."""
        return self.request.cluster.num_devices // (self.num_pipelines or 1)

    @property
    def has_own_layout(self) -> bool:
        """True if the draft is for one device per stage, and has to be laid out."""
        return has_own_layout(self.request, self.schedule)

    @property
    def is_searched(self) -> bool:
        """True if the partitioner sees the schedule and the layout that will run, so that its bounds hold."""
        return self.schedule in SEARCHED and not self.has_own_layout

    def question(self) -> Request:
        """The request that a partitioner gets, for one pipeline. It is the same for candidates that share a search.

        Raises:
            ConfigError: the mini-batch of one pipeline does not give the wanted micro-batches.
        """
        request, own_layout = self.request, self.has_own_layout
        return replace(
            request,
            cluster=self._one_device_per_stage() if own_layout else self._cluster(),
            batch_size=request.batch_size // (self.num_pipelines or 1),
            num_pipelines=self.num_pipelines and 1,
            schedules=(self.schedule if self.schedule in SEARCHED else STANDARD,),
            max_replicas=1 if own_layout else request.max_replicas,
            stages_per_device=None,
            sharding="none",
            chained=False,
            progress=None,
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
        ConfigError: stages are to have replicas that the schedule cannot have.
    """
    if has_own_layout(request, schedule):
        check_replicas(schedule, request.max_replicas)
    numbers = _numbers(request, schedule)
    return [Candidate(request=request, schedule=schedule, num_pipelines=number) for number in numbers]


def num_stages_per_device(request: Request, schedule: str) -> int:
    """The user's number, else that of the schedule."""
    return request.stages_per_device or method_of(schedule).stages_per_device


def has_own_layout(request: Request, schedule: str) -> bool:
    """True if the schedule wants stages in a layout that partitioners do not make."""
    return num_stages_per_device(request, schedule) > 1 or method_of(schedule).bidirectional


def check_replicas(schedule: str, max_replicas: int | None) -> None:
    """Refuse replicas for a schedule that lays its stages out itself, each on one device.

    Raises:
        ConfigError: stages may have several.
    """
    if max_replicas is not None and max_replicas > 1:
        raise ConfigError(
            f"strategy.schedule={schedule!r} puts every stage on one device of a pipeline, "
            f"strategy.max_replicas={max_replicas} allows more. Leave max_replicas out and use strategy.num_pipelines "
            "for data parallelism, or choose strategy.schedule=1f1b."
        )


def _numbers(request: Request, schedule: str) -> Iterator[int | None]:
    """Numbers of pipelines; None leaves the number to the partitioner."""
    devices = request.cluster.num_devices
    if request.num_pipelines is not None:
        yield request.num_pipelines
    elif not has_own_layout(request, schedule) and (request.max_replicas or devices) >= devices:
        yield None
    else:
        yield from (n for n in range(1, devices + 1) if devices % n == 0 and request.batch_size % n == 0)
