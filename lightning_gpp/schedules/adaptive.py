"""List scheduling with the plan's own times: every device always takes the most urgent action that can run.

Gradients of inputs come first, for others wait for them; then forwards, as far as the memory allows; gradients of
parameters fill what is left, and make room where a forward lacks it. Several policies are played against the clock, and
the fastest order wins. The times are the plan's (`Figures`, `Edge.seconds`), so an uneven or branching pipeline gets an
order of its own.

Sources: list scheduling with bounded memory after Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 3.1,
whose heuristic is for chains; priorities by the longest remaining path after Graham and Coffman.
"""

from __future__ import annotations

from itertools import product

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Schedule
from lightning_gpp.schedules.list_clock import Clock, Policy, Tasks
from lightning_gpp.schedules.registry import register

# Two stages in a chain with F = I = W = 1, B = 2, four micro-batches, the memory of 1F1B.
# No stage waits for the gradients of stage 0, so its backwards are whole.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11  12
#   stage 0  F0  F1      B0  ..  F2  B1  ..  F3  B2  ..  B3  ..
#   stage 1      F0  I0  F1  I1  W0  F2  I2  W1  F3  I3  W2  W3


LIMITS = (1.0, 1.5, 2.0, float("inf"))
"""Micro-batches in flight on a stage, in those that 1F1B has there, that are tried; the memory limits all of them."""


@register("adaptive")
def adaptive(plan: Plan, batch_size: int) -> Schedule:
    """The fastest of several list schedules under the plan's memory; as much as 1F1B needs where that is not known."""
    tasks = Tasks.of(plan, batch_size)
    flags = list(product((False, True), repeat=3))
    clocks = [Clock(tasks, Policy(limit, *choice)) for limit in LIMITS for choice in flags]
    best = min((clock.run() for clock in clocks), key=lambda clock: (clock.overdrawn, clock.makespan))
    return Schedule(tuple(map(tuple, best.done)))
