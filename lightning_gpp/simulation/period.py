"""Simulated figures of a pipeline that does not flush between mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Program, compile_program
from lightning_gpp.schedules.continuous import continuous_program, delays_of, unrolled
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
    """

    seconds: float
    fill_and_drain: float
    flushed: float
    delays: Mapping[int, int]


def simulate_period(plan: Plan, costs: StageCosts, num_pipelines: int = 1) -> Period:
    """Simulate the steady state of a plan, as the time that another mini-batch adds to a run of several.

    Raises:
        ScheduleError: the schedule has no steady state.
    """
    program = continuous_program(plan, num_pipelines=num_pipelines)
    number, seconds = program.lead + 2, steady_seconds(program, costs)
    return Period(
        seconds=seconds,
        fill_and_drain=simulate(unrolled(program, number), costs).makespan - number * seconds,
        flushed=simulate(compile_program(plan, copies=num_pipelines), costs).makespan,
        delays=delays_of(program),
    )


def steady_seconds(program: Program, costs: StageCosts) -> float:
    """Simulated seconds from one mini-batch to the next of a program that does not flush."""
    number = program.lead + 2
    some, more = (simulate(unrolled(program, n), costs).makespan for n in (number, number + 2))
    return (more - some) / 2
