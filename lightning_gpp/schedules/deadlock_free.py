"""Raises warm-ups until the orders of 1F1B cannot deadlock.

The rule of `warm_up` looks at one edge at a time. Along several edges, micro-batch sizes that do not divide each other
add up (10 -> {9, 8} -> 1 -> 4 with 93 samples): a backward may need, through a join, a forward that comes after it in
the same order. Such plans are rare: 92 of 8 million random ones with sizes up to 13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.alternating import alternating
from lightning_gpp.schedules.fixed_order import FixedOrder, in_order
from lightning_gpp.schedules.task_graph import Task, TaskGraph, task_graph


def without_deadlock(plan: Plan, batch_size: int, warm_up: Mapping[int, int]) -> dict[int, int]:
    """The warm-ups, raised by as little as it takes.

    As long as the orders deadlock, a stage whose next forward another stage waits for gets one more forward before its
    first backward. With all forwards first nothing waits, so this ends.
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
    """Actions of other stages that an action waits for: those with its last sample."""
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
        number = -(-self.batch_size // self.plan.stages[stage].micro_batch_size)
        return [Action(stage, kind, index) for index in range(number)]

    def _link(self, src: int, dst: int, kind: Kind) -> None:
        size, step = (self.plan.stages[stage].micro_batch_size for stage in (src, dst))
        for action in self._actions(dst, kind):
            last = min((action.micro_batch + 1) * step, self.batch_size) - 1
            self.inputs[action].append(Action(src, kind, last // size))
