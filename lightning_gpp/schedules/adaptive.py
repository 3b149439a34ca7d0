"""Adaptive: the best order of all schedules for the times and memory of the plan.

Every schedule of this package can order any plan, also in a layout that was made for another schedule. Orders that fit
the memory come first, then the step time decides. The times are the plan's (`Figures`, `Edge.seconds`), so uneven and
branching pipelines get an order of their own. Its step is never longer than that of a schedule which the search starts
from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Schedule
from lightning_gpp.schedules.device_orders import device_orders
from lightning_gpp.schedules.list_scheduling import SLACK, FixedOrder, in_order
from lightning_gpp.schedules.one_f_one_b import limits_of
from lightning_gpp.schedules.registry import orders_of, register_schedule
from lightning_gpp.schedules.work import Work, halved, work_of

STARTS: Final = ("1f1b", "zb_h1", "zb_h2", "zero_bubble", "layerpipe", "interleaved", "breadth_first")
MORE_STARTS: Final = ("zbv", "v_half", "v_min", "dualpipe_v", "gpipe", "hanayo")
"""Schedules that the search starts from; the second ones only if there are at most `LARGE` actions."""

LARGE: Final = 1500

# Two branches, 0 and 1, that join in 2. A forward of stage 1 takes two units, every other action one; the branches have
# full backwards, as nobody waits for their input gradients. Four micro-batches; memory for two.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
#   stage 0  F0  F1          B0  ..  F2  B1  ..  F3  B2  ..          B3  ..
#   stage 1  F0  ..  F1  ..  B0  ..  F2  ..  B1  ..  F3  ..  B2  ..  B3  ..
#   stage 2          F0  I0  W0  F1  I1  W1  F2  I2  W2      F3  I3  W3


@register_schedule("adaptive")
def adaptive(plan: Plan, batch_size: int) -> Schedule:
    """The shortest order that fits the plan's memory limits, or the memory of 1F1B if these are unknown."""
    work = work_of(plan, batch_size)
    small = len(work.tasks.seconds) <= LARGE
    orders = list(_orders(work, (*STARTS, *MORE_STARTS) if small else STARTS))
    limits = [limit * SLACK for limit in limits_of(work)]

    def rank(order: FixedOrder) -> tuple[bool, float]:
        excess = any(peak > limit for peak, limit in zip(work.peaks(order.rows), limits, strict=True))
        return excess, order.makespan

    return work.order(min(orders, key=rank).rows)


def _orders(work: Work, names: tuple[str, ...]) -> Iterator[FixedOrder]:
    """The orders of these schedules, with split backwards."""
    for name in names:
        try:
            schedule = _schedule(replace(work.plan, schedule=name), work.batch_size)
        except ScheduleError:
            continue
        order = in_order(work.tasks, halved(schedule.devices))
        if not order.deadlocks:
            yield order


def _schedule(plan: Plan, batch_size: int) -> Schedule:
    """The order of every device. Schedules that order stages are interleaved first."""
    orders = orders_of(plan, batch_size)
    return orders if isinstance(orders, Schedule) else device_orders(plan, orders, batch_size)[0]
