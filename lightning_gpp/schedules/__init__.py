"""Schedules: generators of every device's order of actions, and the passes that make a verified program of it."""

from __future__ import annotations

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
from lightning_gpp.schedules.registry import (
    compile_program,
    in_flight,
    make_schedule,
    register_schedule,
    schedule_names,
)
from lightning_gpp.schedules.verifier import verify

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
