"""Simulated figures of a pipeline that does not flush between mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Program, compile_program
from lightning_gpp.schedules.continuous import continuous_program, delays_of, streaming_program, unrolled
from lightning_gpp.simulation.simulator import simulate
from lightning_gpp.simulation.stage_costs import StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The steady state of a pipeline that does not flush.

    Args:
        seconds: seconds from one mini-batch to the next.
        fill_and_drain: additional seconds, once per flush.
        flushed: seconds of a mini-batch if each is followed by a flush.
        delays: the most updates between a forward and its backward on every stage.
        copies: copies of every stage's weights besides the newest.
        peak_bytes: peak memory of every device, these copies included.
    """

    seconds: float
    fill_and_drain: float
    flushed: float
    delays: Mapping[int, int]
    copies: Mapping[int, int]
    peak_bytes: tuple[float, ...]


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
    number, seconds, delays = program.lead + 2, steady_seconds(program, costs), delays_of(program)
    several = simulate(unrolled(program, number), costs)
    copies = {stage: weight_copies(delay) for stage, delay in delays.items()}
    return Period(
        seconds=seconds,
        fill_and_drain=several.makespan - number * seconds,
        flushed=simulate(compile_program(plan, copies=num_pipelines), costs).makespan,
        delays=delays,
        copies=copies,
        peak_bytes=tuple(
            peak + sum(copies[stage] * costs.replica(stage, device).parameter_bytes for stage in plan.stages_on(device))
            for device, peak in enumerate(several.peak_bytes)
        ),
    )


def simulate_streaming(plan: Plan, costs: StageCosts) -> Period:
    """The same for inference, which has no updates.

    Raises:
        ScheduleError: see `streaming_program`.
    """
    program = streaming_program(plan)
    number, seconds = program.lead + 2, steady_seconds(program, costs)
    several = simulate(unrolled(program, number), costs)
    return Period(
        seconds=seconds,
        fill_and_drain=several.makespan - number * seconds,
        flushed=simulate(compile_program(plan, training=False), costs).makespan,
        delays={},
        copies={},
        peak_bytes=tuple(several.peak_bytes),
    )


def steady_seconds(program: Program, costs: StageCosts) -> float:
    """Simulated seconds from one mini-batch to the next of a program that does not flush."""
    number = program.lead + 2
    some, more = (simulate(unrolled(program, n), costs).makespan for n in (number, number + 2))
    return (more - some) / 2
