"""How many samples stages hold in flight under 1F1B, by the graph of stages alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.work import is_extra
from lightning_gpp.slices import is_sliced, num_slices, unsliced


def in_flight_samples(plan: Plan) -> dict[int, int]:
    """For every stage the samples to hold in flight; see `samples_in_flight` and `slices_in_flight`."""
    if is_sliced(plan):
        return slices_in_flight(plan)
    graph = plan.graph()
    sizes = [stage.micro_batch_size for stage in plan.stages]
    return dict(enumerate(samples_in_flight(sizes, [list(graph.successors(stage)) for stage in range(len(sizes))])))


def slices_in_flight(plan: Plan) -> dict[int, int]:
    """For every stage of a plan whose stages are slices the samples to hold in flight."""
    whole, number = unsliced(plan), num_slices(plan)
    return {
        part: -(-(int(flying) // plan.stages[part].micro_batch_size - position) // number)
        * plan.stages[part].micro_batch_size
        for stage, flying in enumerate(slice_samples(plan))
        for position, part in enumerate(whole.parts(stage))
    }


def slice_samples(plan: Plan, lead: float = 1) -> list[float]:
    """For every stage, all its slices together, the samples of slices to hold in flight.

    A slice counts as the n-th part of a micro-batch, of which there are n. Backwards begin with the last one, so the
    stages nearest to the sink hold n, and others `lead` more for each stage on the way: in a chain n + distance, as
    Seq1F1B has it. Where sizes of micro-batches differ, a slice waits for those before it in several micro-batches, and
    stages are as far apart as if they were not cut. What is nothing but the user's step, of the same size, is not on
    the way, as it shares the device in front of it.
    """
    whole, number = unsliced(plan), num_slices(plan)
    sizes, least = action_samples(plan), [stage.micro_batch_size * number for stage in whole.plan.stages]
    graph = whole.plan.graph()
    for stage in list(graph):
        same = all(least[before] == least[stage] for before in graph.predecessors(stage))
        if same and is_extra(plan, whole.parts(stage)[0]):
            graph.remove_node(stage)
    successors = [list(graph.successors(i)) if i in graph else [] for i in range(len(sizes))]

    def step(stage: int, successor: int) -> int:
        of = sizes if least[stage] == least[successor] else least
        return max(of[stage], of[successor])

    flying = samples_in_flight(sizes, successors, least, step)
    return [base + lead * (usual - base) for base, usual in zip(least, flying, strict=True)]


def action_samples(plan: Plan) -> list[int]:
    """For every stage, its slices put together, the samples of slices that an action computes: those of all slices
    where the stage is not cut."""
    whole, number = unsliced(plan), num_slices(plan)
    return [
        stage.micro_batch_size * (number if len(whole.parts(index)) == 1 else 1)
        for index, stage in enumerate(whole.plan.stages)
    ]


def slices_ahead(plan: Plan, lead: int = 1) -> dict[int, int]:
    """For the first slice of every stage the slices of it, or micro-batches if it is not cut, to hold in flight."""
    whole = unsliced(plan)
    flying = zip(slice_samples(plan, lead), action_samples(plan), strict=True)
    return {whole.parts(stage)[0]: int(samples) // size for stage, (samples, size) in enumerate(flying)}


def samples_in_flight(
    sizes: Sequence[int],
    successors: Sequence[Sequence[int]],
    least: Sequence[int] | None = None,
    step: Callable[[int, int], int] | None = None,
) -> list[int]:
    """For every stage the samples to hold in flight, so that no stage ever waits in a balanced steady state.

    w_sink = b;  w_i = max over successors j of roundup_{b_i}(w_j + max(b_i, b_j)).

    With one micro-batch size b this is b times the depth of the stage. With other sizes a stage must run ahead by the
    larger of both sizes: its successor starts only when a whole micro-batch of its own has arrived.

    Args:
        sizes: of the micro-batches of all stages, in topological order.
        successors: of every stage.
        least: samples of the stages without successors, if not their sizes.
        step: samples by which a stage is ahead of a successor, if not the larger of both sizes.
    """
    samples = list(least or sizes)
    for stage in reversed(range(len(sizes))):
        size = sizes[stage]
        steps = [(j, step(stage, j) if step else max(size, sizes[j])) for j in successors[stage]]
        samples[stage] = max((_round_up(samples[j] + more, size) for j, more in steps), default=samples[stage])
    return samples


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
