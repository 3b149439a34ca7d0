"""The warm-up rule of 1F1B: samples that stages hold in flight, from the stage graph alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.work import is_extra
from lightning_gpp.slices import is_sliced, num_slices, unsliced


def in_flight_samples(plan: Plan) -> dict[int, int]:
    """Samples that every stage holds in flight; see `samples_in_flight` and `slices_in_flight`."""
    if is_sliced(plan):
        return slices_in_flight(plan)
    graph = plan.graph()
    sizes = [stage.micro_batch_size for stage in plan.stages]
    return dict(enumerate(samples_in_flight(sizes, [list(graph.successors(stage)) for stage in range(len(sizes))])))


def slices_in_flight(plan: Plan) -> dict[int, int]:
    """Samples that every stage holds in flight, for a plan whose stages are slices."""
    full, number = unsliced(plan), num_slices(plan)
    return {
        part: -(-(int(flying) // plan.stages[part].micro_batch_size - position) // number)
        * plan.stages[part].micro_batch_size
        for stage, flying in enumerate(slice_samples(plan))
        for position, part in enumerate(full.parts(stage))
    }


def slice_samples(plan: Plan, lead: float = 1) -> list[float]:
    """For every unsliced stage the samples of slices that all its slices together hold in flight.

    Each of the n slices of a micro-batch counts as many samples as the micro-batch. Backwards begin with the last
    slice, so stages nearest to the sink hold n slices, and others `lead` more for each stage on the path: in a chain
    n + distance, as in Seq1F1B. If micro-batch sizes differ, a slice waits for earlier ones in several micro-batches,
    and stages are as far apart as without slices. A stage that holds only the user's step is skipped if its
    micro-batches have the same size: it runs on the device of the stage before it.
    """
    full, number = unsliced(plan), num_slices(plan)
    sizes, least = action_samples(plan), [stage.micro_batch_size * number for stage in full.plan.stages]
    graph = full.plan.graph()
    for stage in list(graph):
        same = all(least[before] == least[stage] for before in graph.predecessors(stage))
        if same and is_extra(plan, full.parts(stage)[0]):
            graph.remove_node(stage)
    successors = [list(graph.successors(i)) if i in graph else [] for i in range(len(sizes))]

    def step(stage: int, successor: int) -> int:
        of = sizes if least[stage] == least[successor] else least
        return max(of[stage], of[successor])

    flying = samples_in_flight(sizes, successors, least, step)
    return [base + lead * (usual - base) for base, usual in zip(least, flying, strict=True)]


def action_samples(plan: Plan) -> list[int]:
    """For every unsliced stage the samples of slices in one action: those of all n slices if it has no slices."""
    full, number = unsliced(plan), num_slices(plan)
    return [
        stage.micro_batch_size * (number if len(full.parts(index)) == 1 else 1)
        for index, stage in enumerate(full.plan.stages)
    ]


def slices_ahead(plan: Plan, lead: int = 1) -> dict[int, int]:
    """For the first slice of every stage the slices to hold in flight, or micro-batches if the stage is not sliced."""
    full = unsliced(plan)
    flying = zip(slice_samples(plan, lead), action_samples(plan), strict=True)
    return {full.parts(stage)[0]: int(samples) // size for stage, (samples, size) in enumerate(flying)}


def samples_in_flight(
    sizes: Sequence[int],
    successors: Sequence[Sequence[int]],
    least: Sequence[int] | None = None,
    step: Callable[[int, int], int] | None = None,
) -> list[int]:
    """Samples that every stage holds in flight, so that no stage waits in a balanced steady state.

    w_sink = b;  w_i = max over successors j of roundup_{b_i}(w_j + max(b_i, b_j)).

    With one micro-batch size b this is b times the depth of the stage. With other sizes a stage must run ahead by the
    larger of both sizes: its successor starts only when a whole micro-batch of its own has arrived.

    Args:
        sizes: of the micro-batches of all stages, in topological order.
        successors: of every stage.
        least: samples of the stages without successors; by default their sizes.
        step: samples by which a stage is ahead of a successor; by default the larger of both sizes.
    """
    samples = list(least or sizes)
    for stage in reversed(range(len(sizes))):
        size = sizes[stage]
        steps = [(j, step(stage, j) if step else max(size, sizes[j])) for j in successors[stage]]
        samples[stage] = max((_round_up(samples[j] + more, size) for j, more in steps), default=samples[stage])
    return samples


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
