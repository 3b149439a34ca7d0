"""Sets of pairs (depth, devices) as the bits of one integer: the answers of the dynamic programme.

Bit `depth * width + devices` says: a strategy exists whose first stages have at most `depth` micro-batches in flight
and that uses exactly `devices` devices. One operation on integers thus treats all depths and numbers of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Grid:
    """The sets for one number of devices. A stage adds 1 to the depth, so no depth exceeds the number of devices."""

    num_devices: int
    width: int = field(init=False)
    row: int = field(init=False)
    _joined: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    _up_to: dict[int, int] = field(default_factory=dict, init=False)
    _masks: dict[tuple[int, int], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.width = self.num_devices + 1
        self.row = (1 << self.width) - 1

    def bit(self, depth: int, devices: int) -> int:
        return 1 << depth * self.width + devices

    def mask(self, replicas: int, limit: int) -> int:
        """Pairs that a stage with so many replicas may stand before, if at most `limit` micro-batches fit it."""
        key = replicas, limit
        if key not in self._masks:
            row = (1 << self.width - replicas) - 1
            self._masks[key] = sum(row << depth * self.width for depth in range(min(limit, self.num_devices)))
        return self._masks[key]

    def up_to(self, devices: int) -> int:
        """All pairs of at most so many devices."""
        if devices not in self._up_to:
            row = (1 << max(0, devices + 1)) - 1
            self._up_to[devices] = sum(row << depth * self.width for depth in range(self.num_devices + 1))
        return self._up_to[devices]

    def rows(self, pairs: int) -> Iterator[tuple[int, int]]:
        """(depth, the devices as bits), by depth; without pairs that have another of less depth."""
        seen, width = 0, self.width
        while pairs:
            depth = ((pairs & -pairs).bit_length() - 1) // width
            found = pairs >> depth * width & self.row
            if found & ~seen:
                yield depth, found & ~seen
            seen |= found
            pairs = pairs >> (depth + 1) * width << (depth + 1) * width

    def least(self, pairs: int, devices: int) -> int | None:
        """The least depth with exactly so many devices."""
        return next((depth for depth, row in self.rows(pairs) if row >> devices & 1), None)

    def join(self, left: int, right: int) -> int:
        """Both side by side: the larger depth, the sum of the devices."""
        if left == 1 or right == 1 or not (left and right):
            return right if left == 1 else left if right == 1 else 0
        key = (left, right) if left < right else (right, left)
        if key not in self._joined:
            self._joined[key] = self._join(left, right)
        return self._joined[key]

    def _join(self, left: int, right: int) -> int:
        lefts, rights = dict(self.rows(left)), dict(self.rows(right))
        result = seen = reach_left = reach_right = 0
        for depth in sorted({*lefts, *rights}):
            reach_left |= lefts.get(depth, 0)
            reach_right |= rights.get(depth, 0)
            found = self.sums(reach_left, reach_right) & ~seen
            result |= found << depth * self.width
            seen |= found
        return result

    def sums(self, left: int, right: int) -> int:
        """All sums of a number of the one and a number of the other, up to the number of devices."""
        if left.bit_count() > right.bit_count():
            left, right = right, left
        result = 0
        while left:
            low = left & -left
            result |= right * low
            left ^= low
        return result & self.row

    def until(self, pairs: int, depth: int) -> int:
        """The devices as bits, of all pairs with at most this depth."""
        found = 0
        for level, row in self.rows(pairs):
            if level <= depth:
                found |= row
        return found
