"""Shapes: stages, as groups of units, with numbers of replicas, in an order of the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from lightning_gpp.planning.problem.draft import Devices, Draft, DraftStage, copies, side_by_side

SLACKENED: Final = "1f1b"
"""The schedule under which slack counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Stages in the order of their devices, from the last one down to device 0, which runs the user's step.

    Args:
        groups: the units of every stage, ascending.
        replicas: number of replicas of every stage.
        size: samples of a micro-batch.
        schedule: name of the schedule.
        spread: replicas of a stage are one pipeline apart instead of side by side; requires equal numbers of replicas.
        slack: the slack of every stage; empty: none.
        places: the devices to use, in the order in which stages take them, device 0 among those of the last stage;
            empty: the first devices, in ascending order. Only for replicas side by side.
    """

    groups: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...]
    size: int
    schedule: str
    spread: bool = False
    slack: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Normalise what makes no difference, so that equal drafts have equal shapes."""
        if self.spread and (len(self.groups) == 1 or max(self.replicas) == 1 or len(set(self.replicas)) > 1):
            object.__setattr__(self, "spread", False)
        if self.slack and (not any(self.slack) or self.schedule != SLACKENED):
            object.__setattr__(self, "slack", ())
        if self.places:
            self._normalise_places()

    def _normalise_places(self) -> None:
        places = () if self.spread else flat(self.devices())
        same = len(self.groups) > 1 and len(set(self.replicas)) == 1 < self.replicas[0]
        spread = same and places == flat(copies(len(self.groups), self.replicas[0]))
        object.__setattr__(self, "spread", self.spread or spread)
        object.__setattr__(self, "places", () if spread or places == tuple(range(len(places))) else places)

    @property
    def num_devices(self) -> int:
        """Number of devices that have a stage; a problem may have more, which stay idle."""
        return sum(self.replicas)

    @property
    def slacks(self) -> tuple[int, ...]:
        """The slack of every stage."""
        return self.slack or (0,) * len(self.groups)

    def devices(self) -> Devices:
        """The devices of every stage, ascending."""
        if self.spread:
            return copies(len(self.groups), self.replicas[0])
        positions = side_by_side(self.replicas)
        if not self.places:
            return positions
        return [tuple(sorted(self.places[position] for position in entry)) for entry in positions]

    def draft(self) -> Draft:
        """The shape as a draft, with devices; what is recomputed stays open."""
        stages = zip(self.groups, self.devices(), self.slacks, strict=True)
        return Draft(
            stages=tuple(
                DraftStage(units=units, devices=where, micro_batch_size=self.size, slack=slack)
                for units, where, slack in stages
            ),
            schedule=self.schedule,
        )

    @classmethod
    def of(cls, draft: Draft) -> Shape | None:
        """The shape of a draft; None if its stages have different micro-batch sizes."""
        if len({stage.micro_batch_size for stage in draft.stages}) > 1:
            return None
        stages = sorted(draft.stages, key=lambda stage: -stage.devices[0])
        stages.sort(key=lambda stage: 0 in stage.devices)
        shape = cls(
            groups=tuple(tuple(sorted(stage.units)) for stage in stages),
            replicas=tuple(len(stage.devices) for stage in stages),
            slack=tuple(stage.slack for stage in stages),
            size=stages[0].micro_batch_size,
            schedule=draft.schedule,
        )
        return replace(shape, places=flat([tuple(sorted(stage.devices)) for stage in stages]))

    def moved(self, units: Sequence[int], src: int, dst: int) -> Shape:
        """Move units from one stage to another; they must not be all of the stage's units."""
        groups = list(self.groups)
        groups[src] = tuple(unit for unit in groups[src] if unit not in units)
        groups[dst] = tuple(sorted((*groups[dst], *units)))
        return replace(self, groups=tuple(groups))

    def with_replicas(self, changes: dict[int, int]) -> Shape:
        """Change the number of replicas of some stages. Devices no longer needed are the last ones."""
        replicas = tuple(changes.get(i, count) for i, count in enumerate(self.replicas))
        return replace(self, replicas=replicas, places=self._places_for(sum(replicas)))

    def _places_for(self, number: int) -> tuple[int, ...]:
        """The places for another number of devices: the first of them, or all and the first others."""
        others = (device for device in range(number) if device not in self.places)
        more = max(0, number - len(self.places))
        return (*self.places[:number], *islice(others, more)) if self.places else ()

    def at(self, places: Sequence[int]) -> Shape:
        """The same stages on other devices."""
        return replace(self, places=tuple(places), spread=False)

    def merged(self, first: int, second: int, num_replicas: int | None = None) -> Shape:
        """Merge two stages, at the position of the second, on the devices of both or on fewer."""
        groups, replicas, slack = self._lists()
        groups[second] = tuple(sorted((*groups[first], *groups[second])))
        replicas[second] = num_replicas or replicas[first] + replicas[second]
        del groups[first], replicas[first], slack[first]
        return self._with(groups, replicas, slack)

    def divided(self, stage: int, upper: Sequence[int], num_upper: int, num_lower: int) -> Shape:
        """Divide a stage: the units `upper` on `num_upper` devices, in front of the rest on `num_lower`."""
        groups, replicas, slack = self._lists()
        rest = tuple(unit for unit in groups[stage] if unit not in set(upper))
        groups[stage : stage + 1] = [tuple(sorted(upper)), rest]
        replicas[stage : stage + 1] = [num_upper, num_lower]
        slack[stage : stage + 1] = [slack[stage]] * 2
        return self._with(groups, replicas, slack)

    def _lists(self) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
        return list(self.groups), list(self.replicas), list(self.slacks)

    def _with(self, groups: list[tuple[int, ...]], replicas: list[int], slack: list[int]) -> Shape:
        places = self._places_for(sum(replicas))
        return replace(self, groups=tuple(groups), replicas=tuple(replicas), slack=tuple(slack), places=places)

    def swapped(self, first: int, second: int) -> Shape:
        """Swap the positions of two stages on the devices."""
        groups, replicas, slack = self._lists()
        groups[first], groups[second] = groups[second], groups[first]
        for entries in (replicas, slack):
            entries[first], entries[second] = entries[second], entries[first]
        return self._with(groups, replicas, slack)


def flat(devices: Devices) -> tuple[int, ...]:
    """All devices, those of the last stage first."""
    return tuple(device for entry in reversed(devices) for device in entry)
