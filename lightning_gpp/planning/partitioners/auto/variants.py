"""The ways to cut that a search tries for its first shapes, in the order in which they are worth it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from lightning_gpp.planning.partitioners.auto.seeds import MAX_SLOTS, Cuts, slowest_kind
from lightning_gpp.planning.problem.problem import Problem


def variants(problem: Problem, found: list[list[int]]) -> Iterator[Cuts]:
    """Ways to cut, the most promising first: equal replicas; middle sizes, branches apart; then all others."""
    yield from _equal(problem, found)
    width, *wider = _widths(problem)
    for apart in (True, False):
        yield from _cuts(problem, found, [width], apart=apart)
    if problem.replicable:
        shared = [width for width in wider if width <= problem.max_replicas]
        yield from _cuts(problem, found, shared, apart=True)


def _equal(problem: Problem, found: list[list[int]]) -> Iterator[Cuts]:
    """Stages with equal numbers of replicas, the shortest steps on paper first."""
    number = problem.num_devices
    most = min(problem.max_replicas, number)
    widths = [w for w in range(1, number + 1) if number % w == 0 and w <= most and number // w <= problem.num_units]
    ways = [(_step_on_paper(problem, cuts), cuts) for cuts in _cuts(problem, found, widths, apart=True)]
    for seconds, cuts in sorted(ways, key=lambda way: way[0]):
        if seconds < inf:
            yield replace(cuts, equal=True)
            if not cuts.recompute and _is_scarce(problem, cuts):
                yield replace(cuts, equal=True, partly=True)


def _is_scarce(problem: Problem, cuts: Cuts) -> bool:
    """True if stages may recompute, and the first of equal ones would have to."""
    stages = problem.num_devices // cuts.width
    saved = float(problem.saved_bytes(-(-cuts.size // cuts.width)).sum())
    needed = float(problem.static_bytes_of(cuts.width).sum()) / stages + saved
    return problem.recompute is None and needed > float(problem.memory_bytes.min())


def _step_on_paper(problem: Problem, cuts: Cuts) -> float:
    """Seconds of a step with equal stages; infinite if their weights do not fit."""
    stages, replicas = problem.num_devices // cuts.width, cuts.width
    if float(problem.static_bytes_of(replicas).sum()) / stages > float(problem.memory_bytes.max()):
        return inf
    table = problem.seconds(-(-cuts.size // replicas), slowest_kind(problem))
    work = float((table.total + (table.forward if cuts.recompute else 0.0)).sum()) / stages
    filling = 0.0 if problem.continuous else stages - 1
    gradients = float(problem.parameter_bytes.sum()) / stages
    summing = problem.cluster.all_reduce_seconds(range(replicas), gradients) if replicas > 1 else 0.0
    return (problem.batch_size / cuts.size + filling) * work + summing


def on_fewer_devices(problem: Problem, found: list[list[int]]) -> Iterator[Cuts]:
    """Ways to cut for fewer devices: one, powers of two, and all but one."""
    numbers = sorted({1 << shift for shift in range(problem.num_devices.bit_length())} | {problem.num_devices - 1})
    for number in numbers:
        if 0 < number < problem.num_devices:
            width = next(width for width in _widths(problem) if number % width == 0 or width > number)
            for cuts in _cuts(problem, found, [min(width, number)], apart=True):
                yield replace(cuts, num_devices=number)


def _cuts(problem: Problem, found: Sequence[list[int]], widths: Sequence[int], *, apart: bool) -> Iterator[Cuts]:
    sizes = sorted(problem.sizes, key=lambda size: abs(-(-problem.batch_size // size) - 4 * problem.num_devices**0.5))
    again = [flag for flag in (False, True) if problem.recompute in (None, flag)]
    for order, size, width, schedule, recompute in product(found, sizes, widths, problem.schedules, again):
        if width <= size:
            yield Cuts(
                order=order,
                size=size,
                width=width,
                apart=apart,
                recompute=recompute,
                schedule=schedule,
                fitting=True,
            )


def _widths(problem: Problem) -> list[int]:
    """Sizes of groups in which devices are assigned: the least for which there are few groups, and its multiples."""
    number = problem.num_devices
    powers = [1 << shift for shift in range(number.bit_length())]
    least = next((width for width in powers if number % width == 0 and number // width <= MAX_SLOTS), 1)
    return [width for width in range(least, number + 1) if number % width == 0 and width % least == 0]
