"""Handcrafted zero-bubble orders: a warm-up, then input gradients and forwards in turn, with weight gradients later."""

from __future__ import annotations

from collections.abc import Collection

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.device_orders import StageOrders
from lightning_gpp.schedules.one_f_one_b import (
    action_samples,
    alternating,
    backwards_of,
    forwards_of,
    in_flight_samples,
    lanes,
    slice_samples,
    slices_ahead,
    without_deadlock,
    without_deadlock_in_slices,
)
from lightning_gpp.schedules.work import unsplit_stages


def samples_ahead(plan: Plan, lead: float) -> dict[int, float]:
    """Samples by which every stage's forwards run ahead: a micro-batch, and `lead` times the rest of 1F1B's.

    With one micro-batch size these are 1 + lead (d - 1) micro-batches on a stage of depth d.
    """
    sizes = [stage.micro_batch_size for stage in plan.stages]
    return {stage: sizes[stage] + lead * (usual - sizes[stage]) for stage, usual in in_flight_samples(plan).items()}


def split_orders(plan: Plan, batch_size: int, lead: int) -> StageOrders:
    """The order of every stage: I, W and F in turn after the warm-up, with W delayed as far as memory allows.

    In a chain, a stage of depth d has a warm-up of 1 + lead (d - 1) micro-batches, and its W follows its I by the
    difference to the longest warm-up. So every stage holds the same number of micro-batches, some of them for W only.
    With several micro-batch sizes, samples are counted instead. Stages without weight gradients have full backwards.

    All n slices of a stage have one order, which counts slices: the warm-up is n + lead (d - 1).
    """
    unsplit = unsplit_stages(plan)
    orders = _in_slices(plan, batch_size, lead) if plan.is_sliced else _in_micro_batches(plan, batch_size, lead)
    return {stage: _joined(order, unsplit) for stage, order in orders.items()}


def _in_micro_batches(plan: Plan, batch_size: int, lead: int) -> StageOrders:
    sizes = [stage.micro_batch_size for stage in plan.stages]
    samples = {stage: int(number) for stage, number in samples_ahead(plan, lead).items()}
    numbers = [len(plan.intervals(stage, batch_size)) for stage in range(len(sizes))]
    counts = {stage: min(number, samples[stage] // sizes[stage]) for stage, number in enumerate(numbers)}
    warm_up, most = without_deadlock(plan, batch_size, counts), max(samples.values())
    return {
        stage: _order(plan, [stage], batch_size, warm_up[stage], (most - samples[stage]) // sizes[stage])
        for stage in range(len(sizes))
    }


def _in_slices(plan: Plan, batch_size: int, lead: int) -> StageOrders:
    parts, samples = lanes(plan), slice_samples(plan, lead)
    late = [int(max(samples) - held) // size for held, size in zip(samples, action_samples(plan), strict=True)]
    lateness = dict(zip(parts, late, strict=True))

    def lane(first: int, warm_up: int) -> tuple[Action, ...]:
        return _order(plan, parts[first], batch_size, warm_up, lateness[first])

    return without_deadlock_in_slices(plan, batch_size, slices_ahead(plan, lead), lane)


def _order(plan: Plan, members: list[int], batch_size: int, warm_up: int, late: int) -> tuple[Action, ...]:
    inputs, weights = (backwards_of(plan, members, batch_size, kind) for kind in (Kind.INPUT, Kind.WEIGHT))
    return alternating(forwards_of(plan, members, batch_size), inputs, warm_up, weights, late)


def _joined(order: tuple[Action, ...], unsplit: Collection[int]) -> tuple[Action, ...]:
    """The order with full backwards in place of input gradients, on stages without weight gradients."""
    return tuple(
        action.of_kind(Kind.BACKWARD) if action.kind is Kind.INPUT and action.stage in unsplit else action
        for action in order
        if action.kind is not Kind.WEIGHT or action.stage not in unsplit
    )
