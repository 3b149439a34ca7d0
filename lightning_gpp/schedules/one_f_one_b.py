"""1F1B on a DAG of stages: each stage alternates backward and forward after a warm-up given by its depth.

Sources: PipeDream (Narayanan et al., SOSP 2019) for the alternation on a chain; GraphPipe (Jeon et al., ASPLOS 2025,
section 6) for warm-up by depth and for micro-batch sizes that differ between stages. GraphPipe prints its rule as an
image; the rule below was reconstructed from the figures in its text and from the authors' strategy files.

Sliced stages alternate backward and forward of slices: Seq1F1B (Sun et al., 2024, arXiv:2406.03488), which is for
chains; on a graph the distance to the sink takes the place of the number of stages that follow. Forwards go from the
first slice to the last, backwards from the last to the first.

Stages of a graph hold fewer micro-batches than those of a chain, too few where messages take long: then a stage waits
for gradients that are on their way. Its slack (`Stage.slack`) are micro-batches that it holds in addition.

The warm-up rule looks at one edge at a time. Along several edges, micro-batch sizes that do not divide each other add
up (10 -> {9, 8} -> 1 -> 4 with 93 samples): a backward may need, through a join, a forward that comes after it in the
same order. Such plans are rare, 92 of 8 million random ones with sizes up to 13; all of their warm-ups are raised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import networkx as nx

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.device_orders import StageOrders, device_orders
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.work import Work, is_extra, turns
from lightning_gpp.slices import Unsliced, num_slices, unsliced

# Two branches, 0 -> 1 and 2, that join in 3; four micro-batches; each stage on its own device. The warm-ups are the
# depths 3, 2, 2, 1. The short branch holds one micro-batch less than stage 0, because only its own depth counts.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11
#   stage 0  F0  F1  F2          B0  F3  B1      B2      B3
#   stage 1      F0  F1      B0  F2  B1  F3  B2      B3
#   stage 2  F0  F1          B0  F2  B1  F3  B2      B3
#   stage 3          F0  B0  F1  B1  F2  B2  F3  B3


@register_schedule("1f1b")
def one_f_one_b(plan: Plan, batch_size: int) -> StageOrders:
    """Warm-up forwards, then one backward and one forward in turn, then the remaining backwards, on every stage."""

    def lane(members: Sequence[int], warm_up: int) -> tuple[Action, ...]:
        forwards, backwards = (lane_actions(plan, members, kind, batch_size) for kind in (Kind.FORWARD, Kind.BACKWARD))
        return alternating(forwards, backwards, warm_up)

    return lane_orders(plan, batch_size, 1, lane)


# Slices: a chain of two stages, two micro-batches in two slices; `F1b` is the forward of slice b of micro-batch 1. A
# backward takes as long as a forward. Stage 0 holds three slices, stage 1 two: one and a half micro-batches, and one.
#
#   time      0    1    2    3    4    5    6    7    8    9
#   stage 0  F0a  F0b  F1a       B0b  F1b  B0a       B1b  B1a
#   stage 1       F0a  F0b  B0b  F1a  B0a  F1b  B1b  B1a

LaneOrder = Callable[[Sequence[int], int], tuple[Action, ...]]
"""From the slices of a stage, or the stage alone, and a warm-up to the order of all of them."""


def lane_orders(plan: Plan, batch_size: int, lead: float, lane: LaneOrder) -> StageOrders:
    """The order of every stage, of all its slices together, under the number of the first one.

    Args:
        plan: the plan.
        batch_size: samples of the mini-batch.
        lead: see `samples_ahead`.
        lane: the order of a stage. All warm-ups are raised by as little as it takes to avoid deadlocks.

    Raises:
        ScheduleError: slices deadlock even with all forwards first.
    """
    members = lanes(plan)
    ahead = zip(members, samples_ahead(plan, lead), action_samples(plan), strict=True)
    counts = {first: int(samples) // size for first, samples, size in ahead}
    if not plan.is_sliced and _is_safe(plan, counts):
        return {first: lane(parts, counts[first]) for first, parts in members.items()}
    more = 0
    while True:
        orders = {first: lane(parts, counts[first] + more) for first, parts in members.items()}
        try:
            device_orders(plan, orders, batch_size)
        except ScheduleError:
            if all(2 * (counts[first] + more) >= len(order) for first, order in orders.items()):
                raise  # although all forwards come first
            more += 1
        else:
            return orders


def lanes(plan: Plan) -> dict[int, list[int]]:
    """The slices of every stage, by the first one."""
    full = unsliced(plan)
    return {members[0]: members for members in map(full.parts, range(len(full.plan.stages)))}


def lane_actions(plan: Plan, members: Sequence[int], kind: Kind, batch_size: int) -> list[Action]:
    """All actions of a kind of a stage's slices, in order: backwards begin with the last slice."""
    ordered = members if kind is Kind.FORWARD else members[::-1]
    numbers = range(len(plan.intervals(members[0], batch_size)))
    return [Action(part, kind, index) for index in numbers for part in ordered]


def warm_up(plan: Plan, batch_size: int) -> dict[int, int]:
    """Number of forwards before every stage's first backward, which is also its maximum of micro-batches in flight."""
    samples = in_flight_samples(plan)
    counts = {stage: held // plan.stages[stage].micro_batch_size for stage, held in samples.items()}
    return {stage: min(count, len(plan.intervals(stage, batch_size))) for stage, count in counts.items()}


def needs_of(work: Work) -> dict[tuple[int, int], float]:
    """Bytes that the replica of a stage on a device holds under 1F1B, by stage and device."""
    flying = warm_up(work.plan, work.batch_size)
    kept: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (device, action), taken in zip(work.tasks.numbers, work.tasks.takes, strict=True):
        if action.kind is Kind.FORWARD:
            kept[action.stage, device].append(taken)
    counts = [-(-flying[index] // turns(stage)) for index, stage in enumerate(work.plan.stages)]
    return {place: sum(sorted(sizes)[-counts[place[0]] :]) for place, sizes in kept.items()}


def limits_of(work: Work, share: float = 1, needs: Mapping[tuple[int, int], float] | None = None) -> tuple[float, ...]:
    """Memory limit of every device; if the plan has none, `share` times the peak of the neediest device under 1F1B.

    `needs`: the result of `needs_of`, if known already.
    """
    if work.limits:
        return work.limits
    totals: dict[int, float] = defaultdict(float)
    for (_, device), need in (needs or needs_of(work)).items():
        totals[device] += need
    return (share * max(totals.values()),) * work.plan.num_devices


def in_flight_samples(plan: Plan) -> dict[int, int]:
    """Samples that every stage, or slice of a stage, holds in flight."""
    full, number = unsliced(plan), num_slices(plan)
    return {
        part: -(-(int(flying) // plan.stages[part].micro_batch_size - position) // number)
        * plan.stages[part].micro_batch_size
        for stage, flying in enumerate(samples_ahead(plan))
        for position, part in enumerate(full.parts(stage))
    }


def samples_ahead(plan: Plan, lead: float = 1) -> list[float]:
    """Samples that every unsliced stage holds in flight: a micro-batch, and `lead` times the rest of 1F1B's.

    With one micro-batch size these are 1 + lead (d - 1) micro-batches on a stage of depth d. Stages that wait for no
    gradient hold one.

    Each of the n slices of a micro-batch counts as many samples as the micro-batch. Backwards begin with the last
    slice, so stages nearest to the sink hold n slices, and others `lead` more for each stage on the path: in a chain
    n + distance, as in Seq1F1B. If micro-batch sizes differ, a slice waits for earlier ones in several micro-batches,
    and stages are as far apart as without slices. A stage that holds only the user's step is then skipped if its
    micro-batches have the same size: it runs on the device of the stage before it.
    """
    full, sizes, slack = unsliced(plan), action_samples(plan), None
    least = [stage.micro_batch_size * num_slices(plan) for stage in full.plan.stages]
    graph = full.plan.graph()
    if plan.is_sliced:
        graph.remove_nodes_from([stage for stage in graph if _shares_device(plan, full, graph, stage)])
    else:
        slack = [stage.slack * stage.micro_batch_size for stage in plan.stages]
    waiting = {edge.src for edge in full.plan.edges if edge.differentiable or plan.is_sliced}
    successors = [list(graph.successors(i)) if i in graph and i in waiting else [] for i in range(len(sizes))]

    def step(stage: int, successor: int) -> int:
        of = sizes if least[stage] == least[successor] else least
        return max(of[stage], of[successor])

    flying = samples_in_flight(sizes, successors, least, step, slack)
    return [base + lead * (usual - base) for base, usual in zip(least, flying, strict=True)]


def _shares_device(plan: Plan, full: Unsliced, graph: nx.DiGraph, stage: int) -> bool:
    """True for a stage that holds only the user's step, with micro-batches of the size of those before it."""
    sizes = {full.plan.stages[before].micro_batch_size for before in graph.predecessors(stage)}
    return sizes <= {full.plan.stages[stage].micro_batch_size} and is_extra(plan, full.parts(stage)[0])


def action_samples(plan: Plan) -> list[int]:
    """Samples of slices in one action of every unsliced stage: those of all n slices if it has no slices."""
    full, number = unsliced(plan), num_slices(plan)
    return [
        stage.micro_batch_size * (number if len(full.parts(index)) == 1 else 1)
        for index, stage in enumerate(full.plan.stages)
    ]


def samples_in_flight(
    sizes: Sequence[int],
    successors: Sequence[Sequence[int]],
    least: Sequence[int] | None = None,
    step: Callable[[int, int], int] | None = None,
    slack: Sequence[int] | None = None,
) -> list[int]:
    """Samples that every stage holds in flight, so that no stage waits in a balanced steady state.

    w_sink = b;  w_i = slack_i + max over successors j of roundup_{b_i}(w_j + max(b_i, b_j)).

    With one micro-batch size b this is b times the depth of the stage. With other sizes a stage must run ahead by the
    larger of both sizes: its successor starts only when a complete micro-batch of its own has arrived.

    Args:
        sizes: micro-batch sizes of all stages, in topological order.
        successors: the successors of every stage.
        least: samples of the stages without successors; by default their sizes.
        step: samples by which a stage is ahead of a successor; by default the larger of both sizes.
        slack: samples that every stage holds in addition, multiples of its size; none for the sinks.
    """
    samples = list(least or sizes)
    for stage in reversed(range(len(sizes))):
        size = sizes[stage]
        steps = [(j, step(stage, j) if step else max(size, sizes[j])) for j in successors[stage]]
        if steps:
            ahead = max(_round_up(samples[j] + more, size) for j, more in steps)
            samples[stage] = ahead + (slack[stage] if slack else 0)
    return samples


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int, weights: Sequence[Action] = (), late: int = 0
) -> tuple[Action, ...]:
    """`warm_up` forwards, then a backward and a forward in turn, then the remaining backwards.

    Args:
        forwards: as many as backwards; all sequences are in the order in which they run.
        backwards: full backwards, or input gradients.
        warm_up: forwards before the first backward.
        weights: weight gradients; none if backwards are full.
        late: number of input gradients of later micro-batches that precede a micro-batch's weight gradients.
    """
    actions = list(forwards[:warm_up])
    for index, backward in enumerate(backwards):
        actions.append(backward)
        if index >= late:
            actions += weights[index - late : index - late + 1]
        actions += forwards[warm_up + index : warm_up + index + 1]
    return (*actions, *weights[max(0, len(backwards) - late) :])


def _is_safe(plan: Plan, warm_up: Mapping[int, int]) -> bool:
    """True if all micro-batches have one size, and no stage has a longer warm-up than its predecessors.

    Then every stage runs the forwards that later stages need before it waits for their gradients.
    """
    one_size = len({stage.micro_batch_size for stage in plan.stages}) == 1
    return one_size and all(edge.src == SOURCE or warm_up[edge.src] >= warm_up[edge.dst] for edge in plan.edges)
