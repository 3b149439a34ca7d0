"""The shape that `auto` changes step by step: groups of units as stages, with numbers of replicas, without devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gpp.planning.problem.draft import Draft, DraftStage
from lightning_gpp.planning.problem.topology import copies, side_by_side


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Stages in the order of their devices, from the last device down to device 0, where the step's stage is.

    Args:
        groups: units of every stage, ascending.
        replicas: of every stage.
        recompute: of every stage.
        size: samples of a micro-batch.
        schedule: name.
        spread: replicas of a stage lie one pipeline apart instead of side by side; only where all numbers are equal.
    """

    groups: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    size: int
    schedule: str
    spread: bool = False

    def __post_init__(self) -> None:
        """Normalise the shape, so that equal drafts are equal shapes if spreading makes no difference."""
        if self.spread and (len(self.groups) == 1 or len(set(self.replicas)) > 1):
            object.__setattr__(self, "spread", False)

    def draft(self) -> Draft:
        """With devices."""
        devices = copies(len(self.groups), self.replicas[0]) if self.spread else side_by_side(self.replicas)
        stages = zip(self.groups, devices, self.recompute, strict=True)
        return Draft(
            stages=tuple(
                DraftStage(units=units, devices=where, micro_batch_size=self.size, recompute=again)
                for units, where, again in stages
            ),
            schedule=self.schedule,
        )

    @classmethod
    def of(cls, draft: Draft) -> Shape | None:
        """The shape of a draft; None if no shape has these devices."""
        stages = sorted(draft.stages, key=lambda stage: -stage.devices[0])
        shape = cls(
            groups=tuple(tuple(sorted(stage.units)) for stage in stages),
            replicas=tuple(len(stage.devices) for stage in stages),
            recompute=tuple(stage.recompute for stage in stages),
            size=stages[0].micro_batch_size,
            schedule=draft.schedule,
        )
        for candidate in (shape, replace(shape, spread=True)):
            if [stage.devices for stage in candidate.draft().stages] == [stage.devices for stage in stages]:
                return candidate
        return None

    def moved(self, units: Sequence[int], src: int, dst: int) -> Shape:
        """Units go from one stage to another; an emptied stage must not be left behind."""
        groups = list(self.groups)
        groups[src] = tuple(unit for unit in groups[src] if unit not in units)
        groups[dst] = tuple(sorted((*groups[dst], *units)))
        return replace(self, groups=tuple(groups))

    def with_replicas(self, changes: dict[int, int]) -> Shape:
        """Other numbers of replicas for some stages."""
        return replace(self, replicas=tuple(changes.get(i, count) for i, count in enumerate(self.replicas)))

    def merged(self, first: int, second: int) -> Shape:
        """Two stages become one, at the place of the second, on the devices of both."""
        groups, replicas, again = list(self.groups), list(self.replicas), list(self.recompute)
        groups[second] = tuple(sorted((*groups[first], *groups[second])))
        replicas[second] += replicas[first]
        again[second] = again[first] and again[second]
        for entries in (groups, replicas, again):
            del entries[first]
        return replace(self, groups=tuple(groups), replicas=tuple(replicas), recompute=tuple(again))

    def divided(self, stage: int, upper: Sequence[int], num_upper: int) -> Shape:
        """One stage becomes two: `upper` units on `num_upper` of its devices, in front of the rest."""
        groups, replicas, again = list(self.groups), list(self.replicas), list(self.recompute)
        rest = tuple(unit for unit in groups[stage] if unit not in set(upper))
        groups[stage : stage + 1] = [tuple(sorted(upper)), rest]
        replicas[stage : stage + 1] = [num_upper, replicas[stage] - num_upper]
        again[stage : stage + 1] = [again[stage]] * 2
        return replace(self, groups=tuple(groups), replicas=tuple(replicas), recompute=tuple(again))

    def swapped(self, first: int, second: int) -> Shape:
        """Two stages exchange their place on the devices."""
        order = list(range(len(self.groups)))
        order[first], order[second] = order[second], order[first]
        return replace(
            self,
            groups=tuple(self.groups[i] for i in order),
            replicas=tuple(self.replicas[i] for i in order),
            recompute=tuple(self.recompute[i] for i in order),
        )
