"""The plan of a draft, and the simulation of the program that would run."""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.planning.assignment.estimate import estimate
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.realise import realise
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import Timeline, simulate


def tried(problem: Problem, draft: Draft, model: str = "") -> tuple[Plan, int, Timeline]:
    """The plan of one pipeline, the number of its copies, and the timeline of one of them.

    Raises:
        PlanError: the draft cannot be a plan.
    """
    plan, copies = realise(problem, draft, model)
    costs = estimate(
        problem.graph, plan, problem.cluster, problem.costs, footprint=problem.footprint, num_pipelines=copies
    )
    return plan, copies, simulate(compile_program(plan, copies=copies), costs)


def num_actions(problem: Problem, draft: Draft) -> int:
    """Actions of a step on all devices: what a simulation's time grows with."""
    return sum(2 * len(stage.devices) * -(-problem.batch_size // stage.micro_batch_size) for stage in draft.stages)
