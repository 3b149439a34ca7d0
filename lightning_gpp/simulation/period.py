"""Simulated figures of a pipeline that does not flush between mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Program, compile_program
from lightning_gpp.schedules.actions import COLLECTIVES, COPIES
from lightning_gpp.schedules.continuous import continuous_program, delays_of, streaming_program, unrolled
from lightning_gpp.simulation.simulator import simulate
from lightning_gpp.simulation.stage_costs import StageCosts
from lightning_gpp.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The steady state of a pipeline that does not flush.

    Args:
        seconds: seconds from one mini-batch to the next.
        fill_and_drain: additional seconds, once per flush.
        flushed: seconds of a mini-batch if each is followed by a flush.
        delays: the most updates between a forward and its backward on every stage.
        copies: copies of every stage's weights besides the newest.
        tied: groups of stages whose devices wait for each other before each update, because they share weights.
        untied: `seconds` if they did not wait.
        timeline: some mini-batches, from an empty pipeline to an empty one; memory includes these copies.
    """

    seconds: float
    fill_and_drain: float
    flushed: float
    delays: Mapping[int, int]
    copies: Mapping[int, int]
    timeline: Timeline
    tied: tuple[tuple[int, ...], ...] = ()
    untied: float = 0.0

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak memory of every device."""
        return self.timeline.peak_bytes

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """Fraction of a period in which every device does not compute."""
        whole = self.seconds * self.timeline.num_batches
        return tuple(1 - busy / whole if whole else 0.0 for busy in self.timeline.busy)


WeightCopies = Callable[[int], int]
"""The copies of a stage's weights that are kept besides the newest, given the stage's delay."""


def no_copies(delay: int) -> int:
    """Only the newest weights are kept."""
    return 0


def simulate_period(
    plan: Plan, costs: StageCosts, num_pipelines: int = 1, weight_copies: WeightCopies = no_copies
) -> Period:
    """Simulate the steady state of a plan, as the time that another mini-batch adds to a run of several.

    Args:
        plan: the plan of one pipeline.
        costs: costs of its stages.
        num_pipelines: pipeline replicas.
        weight_copies: copies of a stage's weights by its delay.

    Raises:
        ScheduleError: the schedule has no steady state.
    """
    program = continuous_program(plan, num_pipelines=num_pipelines)
    delays = delays_of(program)
    copies = {stage: weight_copies(delay) for stage, delay in delays.items()}
    copied = tuple(
        sum(copies[stage] * costs.replica(stage, device).parameter_bytes for stage in plan.stages_on(device))
        for device in range(plan.num_devices)
    )
    flushed = compile_program(plan, copies=num_pipelines)
    return _period(program, flushed, costs, delays=delays, copies=copies, copied_bytes=copied)


def simulate_streaming(plan: Plan, costs: StageCosts) -> Period:
    """The same for inference, which has no updates.

    Raises:
        ScheduleError: see `streaming_program`.
    """
    return _period(streaming_program(plan), compile_program(plan, training=False), costs)


def _period(
    program: Program,
    flushed: Program,
    costs: StageCosts,
    *,
    delays: Mapping[int, int] = MappingProxyType({}),
    copies: Mapping[int, int] = MappingProxyType({}),
    copied_bytes: Sequence[float] = (),
) -> Period:
    """The steady state of a program. `copied_bytes`: bytes of weights that every device keeps besides the newest."""
    number, seconds = program.lead + 2, steady_seconds(program, costs)
    timeline = replace(simulate_several(program, number, costs), num_batches=number)
    timeline = _with_more(timeline, copied_bytes) if copied_bytes else timeline
    return Period(
        seconds=seconds,
        fill_and_drain=timeline.makespan - number * seconds,
        flushed=simulate(flushed, costs).makespan,
        delays=delays,
        copies=copies,
        timeline=timeline,
        tied=costs.tied,
        untied=steady_seconds(program, replace(costs, tied=())) if costs.tied else seconds,
    )


def _with_more(timeline: Timeline, num_bytes: Sequence[float]) -> Timeline:
    """The timeline if every device always holds these bytes, too."""
    peaks = zip(timeline.peak_bytes, num_bytes, strict=True)
    return replace(timeline, peak_bytes=tuple(peak + more for peak, more in peaks))


def steady_seconds(program: Program, costs: StageCosts) -> float:
    """Simulated seconds from one mini-batch to the next of a program that does not flush."""
    number = program.lead + 2
    some, more = (simulate_several(program, n, costs).makespan for n in (number, number + 2))
    return (more - some) / 2


def simulate_several(program: Program, number: int, costs: StageCosts) -> Timeline:
    """The timeline of a number of mini-batches of a program that does not flush.

    Devices whose stages share weights meet before each update: none begins its next period before all have the
    gradients of this one. Meetings are found by repetition, because each may delay those after it.
    """
    several, not_before = unrolled(program, number), dict[tuple[int, int], float]()
    ends = [_ends(program, device, number) for device in range(len(program.devices))]
    meetings = [sorted({d for stage in group for d in program.plan.devices_of(stage)}) for group in costs.tied]
    while True:
        timeline, found = simulate(several, costs, not_before), dict(not_before)
        for devices in meetings if program.training else ():
            for period in range(number):
                latest = max(timeline.devices[device][ends[device][period] - 1].stop for device in devices)
                found.update({(d, ends[d][period]): max(latest, found.get((d, ends[d][period]), 0.0)) for d in devices})
        if found == not_before:
            return timeline
        not_before = found


def _ends(program: Program, device: int, number: int) -> list[int]:
    """The computing actions of a device up to its update after each of a number of mini-batches."""
    rows = zip(program.devices[device], program.ahead[device], strict=True) if program.ahead else ()
    acting = ((each.action, ahead) for each, ahead in rows if each.action is not None)
    aheads = [ahead for action, ahead in acting if action.kind not in (*COLLECTIVES, *COPIES)]
    periods = range(-program.lead_of(device), number)
    counts = [sum(0 <= period + ahead < number for ahead in aheads) for period in periods]
    return list(accumulate(counts))[-number:]
