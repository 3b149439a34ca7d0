"""Decisions of rank 0 for all ranks: what follows from exceptions, and from ranks that do not move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from lightning_gpp.explained import named_at_end
from lightning_gpp.failure.hangs import conclusion, named
from lightning_gpp.failure.processes import ProcessIdentity, say
from lightning_gpp.failure.report import EXIT_CODE, Cause

PATIENCE: Final = 1.5
"""Seconds for all other ranks to raise exceptions of their own after one has."""


class Chair:
    """Decides what follows from the cells of all ranks.

    An exception that every rank raises at the same point of the program, such as that of a pruned trial, leaves nobody
    waiting, and the processes live on. One that only some ranks raise leaves the others in receives for ever. Nobody
    can see in advance which of the two it is, so the ranks have a moment to raise their own.

    Args:
        world_size: number of ranks.
        process: of rank 0.
        propose: lets the job end by a cause.
        announce: shows a cause.

    Attributes:
        board: what all ranks read.
        first: the exception that was reported first, while it waits for those of others, and when that was.
        concluded: who held up the others when a hang was reported, in words.
    """

    def __init__(
        self,
        world_size: int,
        process: ProcessIdentity,
        propose: Callable[[Cause], None],
        announce: Callable[[Cause], None],
    ) -> None:
        self._world_size, self._propose, self._announce = world_size, propose, announce
        self.board: dict[str, Any] = {"process": asdict(process), "beat": 0, "round": 0, "hang": 0}
        self.first: tuple[Cause, float] | None = None
        self.concluded, self._concluded_for, self._stuck_told = "", 0, False

    def hear(self, cells: dict[int, dict[str, Any]], beat: int, now: float, *, ended: bool) -> None:
        """Write the board from the cells of those who have come. `ended`: the cause of the job's end is known."""
        complete = len(cells) == self._world_size
        done = complete and all(cell.get("done") for cell in cells.values())
        self.board |= {"beat": beat, "complete": complete, "done": done, "action": cells[0].get("action", "")}
        if ended:
            return
        self._judge_exceptions(cells, now)
        self._look_for_hangs(cells, complete)

    def _judge_exceptions(self, cells: dict[int, dict[str, Any]], now: float) -> None:
        current = [cell for cell in cells.values() if cell.get("raised") and cell["round"] == self.board["round"]]
        raised = [Cause.of(cell["raised"]) for cell in current]
        if not raised:
            return
        first, since = self.first = self.first or (raised[0], now)
        if len(raised) == self._world_size and len({cause.point for cause in raised}) == 1:
            if first.code != EXIT_CODE:
                self._announce(first)
            shown = next((cause for cause in raised if cause.rank == 0 and cause.event == first.event), first)
            self.board |= {"round": self.board["round"] + 1, "first": asdict(shown)}
            self.first = None
        elif len(raised) == self._world_size or now >= since + PATIENCE:
            self._propose(first)

    def _look_for_hangs(self, cells: dict[int, dict[str, Any]], complete: bool) -> None:
        """Let all ranks report if one is too long in an activity, or each waits for others or has finished and none
        moves. When they have, say who holds up the others.
        """
        told = all(cell.get("told") == self.board["hang"] for cell in cells.values())
        stuck = complete and _are_stuck(cells)
        self._stuck_told = self._stuck_told and stuck
        if told and self.board["hang"] > self._concluded_for:
            self._concluded_for = self.board["hang"]
            self.concluded = conclusion({rank: tuple(cell.get("ranks", ())) for rank, cell in cells.items()})
            say(named_at_end(f"[rank 0] {self.concluded}"))
            self._end_calls_of_some(cells if stuck else {})
        elif told and (any(cell.get("hangs") for cell in cells.values()) or (stuck and not self._stuck_told)):
            self.board["hang"] += 1
            self._stuck_told = stuck

    def _end_calls_of_some(self, cells: dict[int, dict[str, Any]]) -> None:
        """Let the job end if only some of the ranks that are stuck are in a collective that their user's code calls."""
        missing = [rank for rank, cell in sorted(cells.items()) if not cell.get("calls")]
        first = next((rank for rank, cell in sorted(cells.items()) if cell.get("calls")), None)
        if first is None or not missing:
            return
        event = (
            f"waits in a call that {named(missing)} {'does' if len(missing) == 1 else 'do'} not make. Let every rank "
            "make it: conditions such as `trainer.is_global_zero` belong around what does not communicate"
        )
        process = ProcessIdentity(**cells[first]["process"])
        self._propose(Cause(rank=first, process=process, action=cells[first].get("action", ""), event=event))


def _are_stuck(cells: dict[int, dict[str, Any]]) -> bool:
    done = [bool(cell.get("done")) for cell in cells.values()]
    return not all(done) and all(cell.get("done") or cell.get("stuck") for cell in cells.values())
