"""How many samples stages hold in flight under 1F1B, by the graph of stages alone."""

from __future__ import annotations

from collections.abc import Sequence

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
    """For every stage of a plan whose stages are slices the samples to hold in flight.

    A slice counts as the n-th part of a micro-batch, of which there are n. Backwards begin with the last one, so the
    stages nearest to the sink hold n, and others one more for each stage on the way: n + distance in a chain, as
    Seq1F1B has it. What is nothing but the user's step is not on the way, as it shares the device in front of it.
    """
    whole, number = unsliced(plan), num_slices(plan)
    graph = whole.plan.graph()
    parts = [whole.parts(stage) for stage in graph]
    graph.remove_nodes_from([stage for stage in list(graph) if is_extra(plan, parts[stage][0])])
    sizes = [
        stage.micro_batch_size * (number if len(parts[i]) == 1 else 1) for i, stage in enumerate(whole.plan.stages)
    ]
    successors = [list(graph.successors(stage)) if stage in graph else [] for stage in range(len(sizes))]
    least = [stage.micro_batch_size * number for stage in whole.plan.stages]
    flying = samples_in_flight(sizes, successors, least)
    return {
        part: -(-(flying[stage] // entry.micro_batch_size - position) // number) * entry.micro_batch_size
        for stage, entry in enumerate(whole.plan.stages)
        for position, part in enumerate(parts[stage])
    }


def samples_in_flight(
    sizes: Sequence[int], successors: Sequence[Sequence[int]], least: Sequence[int] | None = None
) -> list[int]:
    """For every stage the samples to hold in flight, so that no stage ever waits in a balanced steady state.

    w_sink = b;  w_i = max over successors j of roundup_{b_i}(w_j + max(b_i, b_j)).

    With one micro-batch size b this is b times the depth of the stage. With other sizes a stage must run ahead by the
    larger of both sizes: its successor starts only when a whole micro-batch of its own has arrived.

    Args:
        sizes: of the micro-batches of all stages, in topological order.
        successors: of every stage.
        least: samples of the stages without successors, if not their sizes.
    """
    samples = list(least or sizes)
    for stage in reversed(range(len(sizes))):
        size = sizes[stage]
        ahead = [_round_up(samples[j] + max(size, sizes[j]), size) for j in successors[stage]]
        samples[stage] = max(ahead, default=samples[stage])
    return samples


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
