"""Tables of stage costs for one micro-batch size: seconds per sample, and micro-batches that fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.planning.partitioners.graphpipe.lines import (
    FIXED,
    INPUT_FIXED,
    INPUT_PER_SAMPLE,
    MESSAGES,
    PER_SAMPLE,
    RIGID,
    LineShape,
)
from lightning_gpp.planning.partitioners.graphpipe.series_parallel import units_of
from lightning_gpp.planning.problem.problem import Array, Problem

Counts = NDArray[np.int64]


def weakest_link(cluster: Cluster, num_devices: int) -> Link:
    """The slowest link between `num_devices` neighbouring devices.

    It belongs to the innermost level whose groups all have that many; if single pairs have links of their own, it is
    the weakest of all.
    """
    links = [level.link for level in cluster.levels]
    sizes = [min(np.bincount(np.unique(level.groups, return_inverse=True)[1])) for level in cluster.levels]
    if not cluster.links:
        return next((link for link, size in zip(links, sizes, strict=True) if size >= num_devices), links[-1])
    links.extend(cluster.links.values())
    return Link(latency=max(x.latency for x in links), bytes_per_second=min(x.bytes_per_second for x in links))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """A number of replicas: their share of a micro-batch, links inside and to neighbours, costs of all units."""

    replicas: int
    share: int
    inside: Link
    between: Link
    forward: Array
    backward: Array
    saved: Array


def options_of(problem: Problem, size: int, links: dict[int, Link]) -> list[StageOption]:
    """Powers of two, with at least one sample per replica. A neighbour is assumed to have as many replicas.

    `links`: links by the number of devices that they join, as a cache.
    """

    def joining(num_devices: int) -> Link:
        if num_devices not in links:
            links[num_devices] = weakest_link(problem.cluster, num_devices)
        return links[num_devices]

    found, replicas = [], 1
    while replicas <= min(problem.num_devices, problem.max_replicas, size):
        share = -(-size // replicas)
        kinds = [problem.seconds(share, kind) for kind in range(len(problem.cluster.kinds))]
        option = StageOption(
            replicas=replicas,
            share=share,
            inside=joining(replicas),
            between=joining(2 * replicas),
            forward=np.max([kind.forward for kind in kinds], axis=0),
            backward=np.max([kind.input_gradient + kind.weight_gradient for kind in kinds], axis=0),
            saved=problem.saved_bytes(share),
        )
        found.append(option)
        replicas *= 2
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTables:
    """Costs of all stages of a line, by [option, start, end].

    Args:
        seconds: per sample; infinite if there is no such stage, or if it has to recompute.
        room: micro-batches in flight that fit into memory; 0 if none does.
        longer: seconds with recomputation.
        more_room: micro-batches in flight that fit with recomputation.
        again: true if any stage may recompute.
    """

    seconds: Array
    room: Counts
    longer: Array
    more_room: Counts
    again: bool
    _places: Counts = field(init=False)
    _columns: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        places = np.flatnonzero((self.room > 0) | (self.more_room > 0))
        tables = (self.seconds, self.room, *((self.longer, self.more_room) if self.again else ()))
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_columns", [table.ravel()[places] for table in tables])

    def within(self, target: float) -> tuple[Counts, Counts]:
        """Stages of at most `target` seconds, as indices of the flat tables, and the micro-batches that fit each."""
        seconds, room, *recomputed = self._columns
        limits = np.where(seconds <= target, room, 0)
        if recomputed:
            np.maximum(limits, np.where(recomputed[0] <= target, recomputed[1], 0), out=limits)
        found = np.flatnonzero(limits)
        return self._places[found], limits[found].astype(np.int64)


@dataclass(slots=True, eq=False)
class Tables:
    """Costs of the stages of a line for one micro-batch size."""

    problem: Problem
    size: int
    shape: LineShape
    schedule: str
    links: dict[int, Link] = field(default_factory=dict)
    """Slowest links by the number of neighbouring devices, common to all sizes."""
    options: list[StageOption] = field(init=False)
    _costs: dict[LineShape, StageTables] = field(default_factory=dict, init=False)
    _work: dict[LineShape, list[float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.options = options_of(self.problem, self.size, self.links)

    @property
    def num_micro_batches(self) -> int:
        return -(-self.problem.batch_size // self.size)

    @property
    def bound(self) -> float:
        """Seconds per sample that no strategy can beat: all devices always busy, each unit with its cheapest option."""
        return self.work(self.shape)[0] / self.problem.num_devices

    def work(self, shape: LineShape) -> list[float]:
        """Least device-seconds per sample of a line from every part on."""
        if shape not in self._work:
            spent = [(entry.forward + entry.backward) * entry.replicas for entry in self.options]
            least = np.min(spent, axis=0) / self.size
            parts = [float(least[list(units_of(part))].sum()) for part in shape.line.parts]
            self._work[shape] = [sum(parts[index:]) for index in range(len(parts) + 1)]
        return self._work[shape]

    def costs(self, shape: LineShape) -> StageTables:
        """Costs of all stages of a line."""
        if shape not in self._costs:
            self._costs[shape] = self._of(shape)
        return self._costs[shape]

    def _of(self, shape: LineShape) -> StageTables:
        problem, border = self.problem, shape.border
        forward, backward, saved, (static, parameters, rigid, step) = _sums(shape, problem, self.options)
        valid = _valid(shape, self.options, border[RIGID] + rigid)
        share = _column([option.share for option in self.options])
        transfers = self._transfer(border, share) + self._all_reduce(parameters)
        seconds = (forward + backward) / self.size + transfers
        again = valid & (step == 0) & (problem.recompute is not False)  # the user's step is never run twice
        kept = valid & ((step != 0) | (problem.recompute is not True))
        free, possible = min(problem.memory_bytes) - static, bool(again.any())
        received = border[INPUT_PER_SAMPLE] * share + border[INPUT_FIXED] if possible else np.ones_like(saved)
        return StageTables(
            seconds=np.where(kept, seconds, inf),
            room=self._room(free, saved) * kept,
            longer=np.where(again, seconds + forward / self.size, inf),
            more_room=self._room(free - saved, received) * again if possible else again.astype(np.int64),
            again=possible,
        )

    def _transfer(self, border: Array, share: Array) -> Array:
        """Seconds per sample: the messages of a micro-batch one after the other, each replica sending its share."""
        latency = _column([option.between.latency for option in self.options])
        bytes_per_second = _column([option.between.bytes_per_second for option in self.options])
        num_bytes = border[PER_SAMPLE] * share + border[FIXED]
        seconds: Array = border[MESSAGES] * latency + num_bytes / bytes_per_second
        return seconds / self.size

    def _all_reduce(self, parameters: Array) -> Array:
        """Seconds per sample of the mini-batch, by a ring."""
        steps = _column([2 * (option.replicas - 1) for option in self.options])
        latency = _column([option.inside.latency for option in self.options])
        per_byte = _column([1 / option.replicas / option.inside.bytes_per_second for option in self.options])
        seconds: Array = steps * (latency + parameters * per_byte)
        return seconds / self.problem.batch_size

    def _room(self, free: Array, kept: Array) -> Counts:
        """Micro-batches in flight that fit; if all fit, the number is unlimited. `gpipe` has all of them in flight."""
        most, plenty = self.num_micro_batches, self.problem.num_devices
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(kept > 0, np.floor(free / kept), np.where(free >= 0, inf, 0.0))
        limited = 0.0 if self.schedule == "gpipe" else np.clip(room, 0, plenty)
        return np.where(room >= most, plenty, limited).astype(np.int64)


def _column(values: Sequence[float]) -> Array:
    """One value per option, in a shape that combines with tables by [start, end]."""
    return np.array(values, dtype=float)[:, None, None]


def _sums(shape: LineShape, problem: Problem, options: Sequence[StageOption]) -> tuple[Array, Array, Array, Array]:
    """Sums over the units of every stage: forward, backward and saved bytes by option, and quantities common to all
    options.

    The latter are static and parameter bytes, and the number of indivisible units and of user's steps.
    """
    units = list(shape.line.units)
    rigid = [float(not problem.units.units[unit].divisible) for unit in units]
    step = [float(unit == problem.num_units - 1) for unit in units]
    columns = [getattr(option, name)[units] for name in ("forward", "backward", "saved") for option in options]
    table = np.array([*columns, problem.static_bytes[units], problem.parameter_bytes[units], rigid, step])
    until, missing = table @ shape.before.T.astype(float), table @ (~shape.after.T).astype(float)
    sums: Array = np.maximum(until[:, None, :] - missing[:, :, None], 0.0)
    number = len(options)
    return sums[:number], sums[number : 2 * number], sums[2 * number : 3 * number], sums[3 * number :]


def _valid(shape: LineShape, options: Sequence[StageOption], rigid: Array) -> NDArray[np.bool_]:
    """Mask of valid stages: at least one complete part, and no replicas if anything cannot be cut into shares."""
    starts = np.array([cut.part for cut in shape.starts])[:, None]
    ends = np.arange(1, len(shape) + 1)[None, :]
    several = np.array([option.replicas > 1 for option in options])[:, None, None]
    allowed: NDArray[np.bool_] = (starts < ends) & ~(several & (rigid >= 0.5))
    return allowed
