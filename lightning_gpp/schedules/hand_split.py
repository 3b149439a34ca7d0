"""What hand schedules with a split backward share: a warm-up, then gradients and forwards in turn, W's later."""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.in_flight import in_flight_samples
from lightning_gpp.schedules.merge import StageOrders
from lightning_gpp.schedules.one_f_one_b import without_stall
from lightning_gpp.schedules.work import whole_stages


def samples_ahead(plan: Plan, lead: float) -> dict[int, float]:
    """For every stage the samples by which its forwards are ahead: a micro-batch, and `lead` times the rest of 1F1B's.

    With one size of micro-batches these are 1 + lead (d - 1) micro-batches on a stage of depth d.
    """
    sizes = [stage.micro_batch_size for stage in plan.stages]
    return {stage: sizes[stage] + lead * (usual - sizes[stage]) for stage, usual in in_flight_samples(plan).items()}


def split_orders(plan: Plan, batch_size: int, lead: int) -> StageOrders:
    """The order of every stage: I, W and F in turn after the warm-up; W by as many micro-batches later as fill memory.

    In a chain a stage of depth d has a warm-up of 1 + lead (d - 1) micro-batches, and its W are behind its I by as many
    as its warm-up is shorter than the longest one. So every stage keeps the same number of micro-batches, some of them
    for W only. With several sizes of micro-batches the same is counted in samples. Where there are no gradients of
    parameters, backwards are whole.
    """
    sizes = [stage.micro_batch_size for stage in plan.stages]
    samples = {stage: int(number) for stage, number in samples_ahead(plan, lead).items()}
    numbers = [len(plan.intervals(stage, batch_size)) for stage in range(len(sizes))]
    counts = {stage: min(number, samples[stage] // sizes[stage]) for stage, number in enumerate(numbers)}
    warm_up = without_stall(plan, batch_size, counts)
    most, whole = max(samples.values()), whole_stages(plan)
    orders = {
        stage: _order(stage, warm_up[stage], (most - samples[stage]) // sizes[stage], number)
        for stage, number in enumerate(numbers)
    }
    return {stage: _joined(order) if stage in whole else order for stage, order in orders.items()}


def _order(stage: int, warm_up: int, late: int, number: int) -> tuple[Action, ...]:
    actions = [Action(stage, Kind.FORWARD, index) for index in range(warm_up)]
    for index in range(number):
        actions.append(Action(stage, Kind.INPUT, index))
        if index >= late:
            actions.append(Action(stage, Kind.WEIGHT, index - late))
        if warm_up + index < number:
            actions.append(Action(stage, Kind.FORWARD, warm_up + index))
    actions += [Action(stage, Kind.WEIGHT, index) for index in range(max(0, number - late), number)]
    return tuple(actions)


def _joined(order: tuple[Action, ...]) -> tuple[Action, ...]:
    """The same with whole backwards in the place of their first halves."""
    rest = (action for action in order if action.kind is not Kind.WEIGHT)
    return tuple(action._replace(kind=Kind.BACKWARD) if action.kind is Kind.INPUT else action for action in rest)
