"""Published orders of a V as due times: the chain that they are made for is played, and stages take its times.

A chain of 2p stages turns back at device p, so that rank i of the V holds stages i and 2p - 1 - i. An order is a list
of actions per rank. Played on a clock of units it tells when a stage at some level works on some micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.nominal_times import coarse_numbers, levels

Order = Callable[[int, int, int], Sequence[Action]]
"""From rank, number of ranks and number of micro-batches to what the rank does; stages are those of the chain."""

_UNITS: Final = {Kind.FORWARD: 1, Kind.INPUT: 1, Kind.WEIGHT: 1, Kind.BACKWARD: 2}


class Template:
    """A published order, played on the chain of a plan's depth.

    Args:
        plan: whose stages take the times.
        batch_size: samples of the mini-batch.
        order: of the V.
    """

    def __init__(self, plan: Plan, batch_size: int, order: Order) -> None:
        self._levels, length = levels(plan)
        self._numbers = coarse_numbers(plan, batch_size)
        # An order needs enough micro-batches to fill the pipeline: those beyond the plan's are left out afterwards.
        ranks, enough = length // 2, max(length, *(row[-1] + 1 for row in self._numbers))
        self._start = played([list(order(rank, ranks, enough)) for rank in range(ranks)], length)

    def time(self, action: Action) -> float:
        """When the template starts an action, or the whole backward that holds it."""
        place = self._place(action)
        return self._start.get(place, self._start.get(place._replace(kind=Kind.BACKWARD), 0.0))

    def is_split(self, action: Action) -> bool:
        """Whether the template splits the backward of the action's stage and micro-batch."""
        return self._place(action)._replace(kind=Kind.INPUT) in self._start

    def _place(self, action: Action) -> Action:
        """The action of the chain that stands for an action of the plan."""
        number = self._numbers[action.stage][action.micro_batch]
        return Action(self._levels[action.stage], action.kind, number)


def numbered(steps: Sequence[str], stages: tuple[int, int]) -> list[Action]:
    """Steps as actions: the n-th of its kind and stage is that of micro-batch n.

    `F0` is a forward of the first stage, `I` and `W` halves of a backward, `B` a whole one; `W` without a stage is the
    oldest that was not done.
    """
    counts: Counter[tuple[str, str]] = Counter()
    waiting: list[Action] = []
    done: list[Action] = []
    for step in steps:
        kind, stage = step[0], step[1:]
        if kind == "W":
            done.append(next(action for action in waiting if not stage or action.stage == stages[int(stage)]))
            waiting.remove(done[-1])
            continue
        count = (kind.replace("I", "B"), stage)
        done.append(Action(stages[int(stage)], Kind(kind), counts[count]))
        counts[count] += 1
        if kind == "I":
            waiting.append(done[-1]._replace(kind=Kind.WEIGHT))
    return done


def played(rows: Sequence[Sequence[Action]], length: int) -> Mapping[Action, float]:
    """When every action starts if all ranks follow their lists and communication takes no time.

    Args:
        rows: of every rank.
        length: of the chain, in stages.
    """
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    position, free = [0 for _ in rows], [0.0 for _ in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row) and all(need in ends for need in _needs(row[position[rank]], length, ends)):
                action = row[position[rank]]
                arrival = max((ends[need] for need in _needs(action, length, ends)), default=0.0)
                starts[action] = max(free[rank], arrival)
                free[rank] = ends[action] = starts[action] + _UNITS[action.kind]
                position[rank] += 1
                moved = True
    return starts


def _needs(action: Action, length: int, ends: Mapping[Action, float]) -> list[Action]:
    """What an action waits for: its neighbour in the chain."""
    if action.kind is Kind.FORWARD:
        return [action._replace(stage=action.stage - 1)] if action.stage else []
    if action.kind is Kind.WEIGHT or action.stage == length - 1:
        return []
    after = action._replace(stage=action.stage + 1)
    kinds = (Kind.INPUT, Kind.BACKWARD)
    return [next((a for kind in kinds if (a := after._replace(kind=kind)) in ends), after)]
