"""Schedules: the order of every device's actions, by name, and the way from there to a verified program."""

from __future__ import annotations

from lightning_gpp.plan import Plan, Stage
from lightning_gpp.schedules import adaptive as _adaptive  # noqa: F401  registers itself
from lightning_gpp.schedules import bitpipe as _bitpipe  # noqa: F401  registers itself
from lightning_gpp.schedules import breadth_first as _breadth_first  # noqa: F401  registers itself
from lightning_gpp.schedules import chimera as _chimera  # noqa: F401  registers itself
from lightning_gpp.schedules import dualpipe_v as _dualpipe_v  # noqa: F401  registers itself
from lightning_gpp.schedules import gpipe as _gpipe  # noqa: F401  registers itself
from lightning_gpp.schedules import hanayo as _hanayo  # noqa: F401  registers itself
from lightning_gpp.schedules import interleaved as _interleaved  # noqa: F401  registers itself
from lightning_gpp.schedules import layerpipe as _layerpipe  # noqa: F401  registers itself
from lightning_gpp.schedules import one_f_one_b as _one_f_one_b  # noqa: F401  registers itself
from lightning_gpp.schedules import v_half as _v_half  # noqa: F401  registers itself
from lightning_gpp.schedules import v_min as _v_min  # noqa: F401  registers itself
from lightning_gpp.schedules import zb_h1 as _zb_h1  # noqa: F401  registers itself
from lightning_gpp.schedules import zb_h2 as _zb_h2  # noqa: F401  registers itself
from lightning_gpp.schedules import zbv as _zbv  # noqa: F401  registers itself
from lightning_gpp.schedules import zero_bubble as _zero_bubble  # noqa: F401  registers itself
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.lowering import lower
from lightning_gpp.schedules.program import Instruction, Message, Op, Program
from lightning_gpp.schedules.registry import flights, in_flight, make_schedule, register_schedule, schedule_names
from lightning_gpp.schedules.verifier import collective_deadlock, verify

__all__ = [
    "Action",
    "Instruction",
    "Kind",
    "Message",
    "Op",
    "Program",
    "Schedule",
    "compile_program",
    "in_flight",
    "lower",
    "make_schedule",
    "register_schedule",
    "schedule_names",
    "verify",
]


def compile_program(
    plan: Plan, batch_size: int | None = None, training: bool = True, *, copies: int = 1, reduce: bool = True
) -> Program:
    """Make a program: order, lower and verify.

    Args:
        plan: names the schedule.
        batch_size: samples of the mini-batch of one pipeline replica; the plan's own by default.
        training: forwards and backwards; forwards only if False.
        copies: number of pipeline replicas.
        reduce: whether gradients are reduced over ranks; False before the last of several accumulated mini-batches.

    Raises:
        ScheduleError: the schedule is unknown, cannot run, or exceeds the micro-batches in flight that it promised.
        PlanError: tensors that cannot be cut would have to be.
    """
    replicated = {i for i, stage in enumerate(plan.stages) if len(stage.devices) * copies > 1 and _reduces(stage)}
    schedule = make_schedule(plan, batch_size, training, replicated=replicated)
    if not reduce:
        schedule = schedule.without(Kind.REDUCE)
    program = lower(plan, schedule, batch_size, training)
    if collective_deadlock(program):
        schedule = make_schedule(plan, batch_size, training, replicated=replicated, apart=True)
        program = lower(plan, schedule if reduce else schedule.without(Kind.REDUCE), batch_size, training)
    verify(program, flights(schedule) if training else {})
    return program


def _reduces(stage: Stage) -> bool:
    """True if a stage reduces gradients. Of slices, which share parameters, the first does: its backward ends last."""
    return stage.tokens is None or not stage.tokens[0]
