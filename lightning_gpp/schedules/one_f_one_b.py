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
same order. Such plans are rare, 92 of 8 million random ones with sizes up to 13; their warm-ups are raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.device_orders import StageOrders, device_orders
from lightning_gpp.schedules.fixed_order import FixedOrder, in_order
from lightning_gpp.schedules.list_scheduling import Task, TaskGraph, task_graph
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.work import is_extra
from lightning_gpp.slices import num_slices, unsliced

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
    if plan.is_sliced:
        return in_slices(plan, batch_size)
    counts = warm_up(plan, batch_size)
    return {stage: _order(stage, count, len(plan.intervals(stage, batch_size))) for stage, count in counts.items()}


def _order(stage: int, warm_up: int, number: int) -> tuple[Action, ...]:
    forwards, backwards = ([Action(stage, kind, i) for i in range(number)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    return alternating(forwards, backwards, warm_up)


def warm_up(plan: Plan, batch_size: int) -> dict[int, int]:
    """Number of forwards before every stage's first backward, which is also its maximum of micro-batches in flight."""
    counts = {}
    for stage, samples in in_flight_samples(plan).items():
        wanted = samples // plan.stages[stage].micro_batch_size
        counts[stage] = min(wanted, len(plan.intervals(stage, batch_size)))
    return without_deadlock(plan, batch_size, counts)


def in_flight_samples(plan: Plan) -> dict[int, int]:
    """Samples that every stage holds in flight; see `samples_in_flight` and `slices_in_flight`."""
    if plan.is_sliced:
        return slices_in_flight(plan)
    graph = plan.graph()
    sizes = [stage.micro_batch_size for stage in plan.stages]
    successors = [list(graph.successors(stage)) for stage in range(len(sizes))]
    slack = [stage.slack * stage.micro_batch_size for stage in plan.stages]
    return dict(enumerate(samples_in_flight(sizes, successors, slack=slack)))


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
    """Samples of slices that all slices of every unsliced stage together hold in flight.

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
    """Samples of slices in one action of every unsliced stage: those of all n slices if it has no slices."""
    full, number = unsliced(plan), num_slices(plan)
    return [
        stage.micro_batch_size * (number if len(full.parts(index)) == 1 else 1)
        for index, stage in enumerate(full.plan.stages)
    ]


def slices_ahead(plan: Plan, lead: int = 1) -> dict[int, int]:
    """Number of slices to hold in flight, by the first slice of every stage; micro-batches if it is unsliced."""
    full = unsliced(plan)
    flying = zip(slice_samples(plan, lead), action_samples(plan), strict=True)
    return {full.parts(stage)[0]: int(samples) // size for stage, (samples, size) in enumerate(flying)}


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


def without_deadlock(plan: Plan, batch_size: int, warm_up: Mapping[int, int]) -> dict[int, int]:
    """The warm-ups, raised by as little as it takes to avoid deadlocks.

    While the orders deadlock, a stage with a next forward that another stage waits for gets one more forward before its
    first backward. This ends, because with all forwards first nothing waits.
    """
    counts = dict(warm_up)
    if _is_safe(plan, counts):
        return counts
    stages = _StageTasks(plan, batch_size)
    while (outcome := in_order(stages.tasks, stages.rows(counts))).deadlocks:
        counts[stages.culprit(outcome)] += 1
    return counts


def _is_safe(plan: Plan, warm_up: Mapping[int, int]) -> bool:
    """True if all micro-batches have one size, and no stage has a longer warm-up than its predecessors.

    Then every stage runs the forwards that later stages need before it waits for their gradients.
    """
    one_size = len({stage.micro_batch_size for stage in plan.stages}) == 1
    return one_size and all(edge.src == SOURCE or warm_up[edge.src] >= warm_up[edge.dst] for edge in plan.edges)


@dataclass(slots=True)
class _StageTasks:
    """The forwards and backwards of all stages, each stage on a device of its own."""

    plan: Plan
    batch_size: int
    inputs: dict[Action, list[Action]] = field(init=False)
    """Actions of other stages that an action waits for; they contain its last sample."""
    tasks: TaskGraph = field(init=False)

    def __post_init__(self) -> None:
        stages = range(len(self.plan.stages))
        actions = [
            action
            for stage in stages
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for action in self._actions(stage, kind)
        ]
        self.inputs = {action: [] for action in actions}
        for edge in self.plan.edges:
            if edge.src != SOURCE:
                self._link(edge.src, edge.dst, Kind.FORWARD)
            if edge.src != SOURCE and edge.differentiable:
                self._link(edge.dst, edge.src, Kind.BACKWARD)
        readers: dict[Task, list[tuple[Task, float]]] = {(action.stage, action): [] for action in actions}
        for action, needs in self.inputs.items():
            for need in needs:
                readers[need.stage, need].append(((action.stage, action), 0.0))
        missing = {(action.stage, action): len(needs) for action, needs in self.inputs.items()}
        self.tasks = task_graph(dict.fromkeys(readers, 0.0), readers, missing)

    def rows(self, warm_up: Mapping[int, int]) -> list[Sequence[Action]]:
        """The order of every stage."""
        return [
            alternating(self._actions(stage, Kind.FORWARD), self._actions(stage, Kind.BACKWARD), warm_up[stage])
            for stage in range(len(self.plan.stages))
        ]

    def culprit(self, outcome: FixedOrder) -> int:
        """The stage nearest to a sink that waits for gradients while another stage waits for its next forward."""
        depths = self.plan.depths()
        heads = [next((task for task in row if outcome.missing[task]), None) for row in outcome.order]
        kinds = [None if task is None else self.tasks.actions[task].kind for task in heads]
        culprits = {
            need.stage
            for task in heads
            if task is not None and self.tasks.actions[task].kind is Kind.FORWARD
            for need in self.inputs[self.tasks.actions[task]]
            if kinds[need.stage] is Kind.BACKWARD and outcome.missing[self.tasks.numbers[need.stage, need]]
        }
        return min(culprits, key=lambda stage: (depths[stage], stage))

    def _actions(self, stage: int, kind: Kind) -> list[Action]:
        return [Action(stage, kind, index) for index in range(len(self.plan.intervals(stage, self.batch_size)))]

    def _link(self, src: int, dst: int, kind: Kind) -> None:
        ends = (stop for _, stop in self.plan.intervals(dst, self.batch_size))
        for action, stop in zip(self._actions(dst, kind), ends, strict=True):
            number = self.plan.micro_batch_of(src, stop - 1, self.batch_size)
            self.inputs[action].append(Action(src, kind, number))


LaneOrder = Callable[[int, int], tuple[Action, ...]]
"""From the first slice of a stage and a warm-up to the order of all its slices."""

# A chain of two stages, two micro-batches in two slices: `F1b` is the forward of slice b of micro-batch 1. A backward
# takes as long as a forward. Stage 0 holds three slices, stage 1 two: one and a half micro-batches, and one.
#
#   time      0    1    2    3    4    5    6    7    8    9
#   stage 0  F0a  F0b  F1a       B0b  F1b  B0a       B1b  B1a
#   stage 1       F0a  F0b  B0b  F1a  B0a  F1b  B1b  B1a


def in_slices(plan: Plan, batch_size: int) -> StageOrders:
    """The order of all slices of each stage together, under the number of the first slice."""
    parts = lanes(plan)

    def lane(first: int, warm_up: int) -> tuple[Action, ...]:
        forwards = forwards_of(plan, parts[first], batch_size)
        return alternating(forwards, backwards_of(plan, parts[first], batch_size), warm_up)

    return without_deadlock_in_slices(plan, batch_size, slices_ahead(plan), lane)


def lanes(plan: Plan) -> dict[int, list[int]]:
    """The slices of every stage, by the first one."""
    full = unsliced(plan)
    return {members[0]: members for members in map(full.parts, range(len(full.plan.stages)))}


def forwards_of(plan: Plan, members: Sequence[int], batch_size: int) -> list[Action]:
    """All forwards of a stage's slices, in order."""
    number = len(plan.intervals(members[0], batch_size))
    return [Action(part, Kind.FORWARD, index) for index in range(number) for part in members]


def backwards_of(plan: Plan, members: Sequence[int], batch_size: int, kind: Kind = Kind.BACKWARD) -> list[Action]:
    """All backwards of a stage's slices, or halves of one kind, in order."""
    number = len(plan.intervals(members[0], batch_size))
    return [Action(part, kind, index) for index in range(number) for part in reversed(members)]


def without_deadlock_in_slices(plan: Plan, batch_size: int, warm_up: Mapping[int, int], lane: LaneOrder) -> StageOrders:
    """The orders with these warm-ups, all raised by as little as it takes to avoid deadlocks.

    Raises:
        ScheduleError: they deadlock even with all forwards first.
    """
    counts = dict(warm_up)
    while True:
        orders = {first: lane(first, count) for first, count in counts.items()}
        try:
            device_orders(plan, orders, batch_size)
        except ScheduleError:
            if all(2 * count >= len(orders[first]) for first, count in counts.items()):
                raise
            counts = {first: count + 1 for first, count in counts.items()}  # with all forwards first, nothing waits
        else:
            return orders
