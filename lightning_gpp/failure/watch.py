"""The watch: two threads that look after this rank and the others while the main thread computes or waits.

Ranks know of each other through a store, that of the process group:

    rank K    a cell that rank K writes: that it lives, what it does, the exception that it has raised
    board     written by rank 0, which reads all cells: what follows from exceptions, hang reports, the regular end
    end       the first cause of the job's end, written once, by whoever finds it

One thread talks with the store, and may wait in vain for it. The other looks at processes and clocks, and ends this
process: the main thread may wait in a receive for ever.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # it has no types

from lightning_gpp.explained import named_at_end
from lightning_gpp.failure.chair import Chair
from lightning_gpp.failure.hangs import Activity, Progress
from lightning_gpp.failure.limits import Limits
from lightning_gpp.failure.processes import ENDED, ProcessIdentity, exit_now, say
from lightning_gpp.failure.report import EXIT_CODE, Cause, record_consequence

SUSPICION: Final = 2.0
"""Seconds of silence that are enough where a connection has been lost."""
ANSWER: Final = 1.0
"""Seconds for the store to answer, and for others to learn of the end before the process that serves it ends."""
_SOON: Final = 0.05
"""Seconds between two looks at the store while ranks wait for each other's end."""
_LOOK: Final = 0.1
"""Seconds between two looks at processes (how one has ended is known until its parent has asked), and of rank 0 at the
store: signals that ask the job to stop come this way.
"""
_PAUSE: Final = 5.0
"""Seconds without a look after which this thread counts as having been stopped."""
_STOPPED: Final = ("T", "t")
_STARVED: Final = ("R", "S", "D")
"""States of a process that is there, and silent: it waits for a processor, for memory or for a disk."""
_LENIENCE: Final = 5
"""Times the timeout that such a process may be silent: the time in which all ranks must have ended after a failure."""


@dataclass(slots=True)
class _Peer:
    """Another rank, as far as it is known: its process, the last content of its cell, and when that changed."""

    process: ProcessIdentity
    heard: float
    cell: dict[str, Any] = field(default_factory=dict)
    ending: str = ""
    """The way its process ended, as seen on this machine."""

    @property
    def finished(self) -> bool:
        return bool(self.cell.get("done"))


class Watch:
    """Watches the ranks of a job through a store, in which all of them use the same keys.

    Args:
        rank: this rank.
        world_size: number of ranks.
        limits: times.
        activity: of this rank (`2F1, training`).
        before_exit: called before the watch ends this process, for those that it has started.

    Attributes:
        cause: the first cause of the job's failure; None until it is known here.
        stop_signal: the first signal that asks the job to stop, 0 if there is none; on rank 0 of any rank, elsewhere
            its own.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        limits: Limits | None = None,
        activity: Activity | None = None,
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world_size, self.limits = rank, world_size, limits or Limits()
        self.cause: Cause | None = None
        self.stop_signal = 0
        self._known = threading.Event()
        """Set after `cause` is known and printed."""
        self._first: Cause | None = None
        """The exception that was reported first, if all ranks have raised the one that this rank has reported."""
        self._judged = threading.Event()
        """Set after it is known what follows from the exception that this rank has reported."""
        self._complete = threading.Event()
        """Set after all ranks have come."""
        self._progress = Progress(rank, world_size, activity or Activity(), self.limits.hang)
        self._before_exit, silence = before_exit, self.limits.silence
        self._interval = min(max(silence / 8, 0.05), 0.5 if rank else max(_LOOK, world_size / 1000))
        self._process = ProcessIdentity.current()
        self._beat = 0
        self._cell: dict[str, Any] = {"round": 0, "told": 0}
        self._peers: dict[int, _Peer] = {}
        self._keys = [f"rank {each}" for each in range(world_size)]
        self._wake, self._finished, self._gone = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.RLock()
        self._proposed: tuple[Cause, float] | None = None
        self._lost = False
        self._end_by = float("inf")

    # --- what this rank says

    def _begin(self, store: Store) -> None:
        """Start the threads, as soon as rank 0 is there. Raises DistError if it does not come.

        `store`: of all ranks; this object's own connection.
        """
        self._store, self._process = store, ProcessIdentity.current()
        self._chair = Chair(self.world_size, self._process, self._propose, self._announce)
        self._note(process=asdict(self._process))
        self._look_at_myself(time.monotonic())
        if self.rank == 0:
            for key in (*self._keys, "end"):
                store.set(key, "")
            store.set("board", json.dumps(self._chair.board))
        board = json.loads(store.get("board"))
        store.set_timeout(timedelta(days=1))  # a stopped process is for the other thread
        if self.rank != 0:
            self._peers[0] = _Peer(ProcessIdentity(**board["process"]), time.monotonic())
        for number, run in enumerate((self._converse, self._look_around)):
            threading.Thread(target=self._guarded, args=(run,), name=f"gpp-watch-{number}", daemon=True).start()

    def _propose(self, cause: Cause) -> None:
        """Let the job end, by this cause if it is the first; an exception that waits for others came before."""
        with self._lock:
            if self._proposed is None:
                first = self._chair.first
                self._proposed = cause if first is None else first[0], time.monotonic()
        self._wake.set()

    def _say(self, **facts: Any) -> None:
        self._note(**facts)
        self._wake.set()

    def _note(self, **facts: Any) -> None:
        with self._lock:
            self._cell = {**self._cell, **facts}

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # without memory, for example
            say(f"[rank {self.rank}] This process ends, as it can no longer watch over the others: {error!r}")
            exit_now(EXIT_CODE)

    # --- the thread that talks with the store

    def _converse(self) -> None:
        try:
            while not self._gone.is_set() and not self._is_orphan():
                self._talk()
                self._wake.wait(_SOON if self._is_ending() else self._interval)
                self._wake.clear()
        except dist.DistError:
            self._lost = True

    def _is_ending(self) -> bool:
        return bool(self._cell.get("done")) or self.cause is not None

    def _is_orphan(self) -> bool:
        """True if the process that serves the store has ended; torch would write a page of warnings."""
        serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        lost = serves and self.rank != 0 and self._peers[0].process.state() in ENDED
        if lost:
            self._peers[0].ending = self._peers[0].process.ending()
        self._lost = lost
        return lost

    def _talk(self) -> None:
        leaves = self.cause is not None or self._finished.is_set()
        self._beat += 1
        self._store.set(f"rank {self.rank}", json.dumps({**self._cell, "beat": self._beat, "gone": leaves}))
        if leaves and self.rank != 0:
            self._gone.set()
            return
        self._settle()
        self._hear()

    def _settle(self) -> None:
        """Look whether processes that have ended had finished, and let the first cause be the cause."""
        for rank, peer in list(self._peers.items()):
            if peer.ending and not peer.finished and self._proposed is None:
                peer.cell = json.loads(self._store.get(f"rank {rank}") or "{}")
                if not peer.finished:
                    raised = peer.cell.get("raised")
                    self._propose(Cause.of(raised) if raised else self._found(rank, peer.ending))
        if self._proposed is not None:
            self._store.compare_set("end", "", json.dumps(asdict(self._proposed[0])))

    def _hear(self) -> None:
        keys = ["end", "board", *(self._keys if self.rank == 0 else ())]
        end, board, *cells = self._store.multi_get(keys)
        now = time.monotonic()
        if end:
            self._adopt(Cause.of(json.loads(end)))
        if self.rank == 0:
            self._hear_cells([json.loads(cell) if cell else {} for cell in cells], now)
            self._preside(now)
            self._store.set("board", json.dumps(self._chair.board))
            board = json.dumps(self._chair.board).encode()
        self._hear_board(json.loads(board), now)

    def _hear_board(self, board: dict[str, Any], now: float) -> None:
        if self.rank != 0:
            peer = self._peers[0]
            peer.heard = peer.heard if board["beat"] == peer.cell.get("board") else now
            peer.cell = {"board": board["beat"], "action": board.get("action", ""), "done": board.get("done", False)}
            self._meet_neighbours(board, now)
        if board["round"] > self._cell["round"]:
            self._say(round=board["round"], raised=None)
            self._first = Cause.of(board["first"])
            self._judged.set()
        if board["hang"] > self._cell["told"]:
            self._progress.report(now)
            self._say(told=board["hang"], hangs=False)
        if board.get("done"):
            self._finished.set()

    def _meet_neighbours(self, board: dict[str, Any], now: float) -> None:
        """Once all have come, know the processes whose end can be seen from here."""
        if board.get("complete") and not self._complete.is_set():
            self._complete.set()
            for rank, cell in enumerate(map(json.loads, self._store.multi_get(self._keys))):
                process = ProcessIdentity(**cell["process"])
                if rank not in (0, self.rank) and process.machine == self._process.machine:
                    self._peers[rank] = _Peer(process, now)

    # --- on rank 0

    def _hear_cells(self, cells: list[dict[str, Any]], now: float) -> None:
        for rank, cell in enumerate(cells):
            if rank and cell:
                peer = self._peers.setdefault(rank, _Peer(ProcessIdentity(**cell["process"]), now))
                peer.heard = peer.heard if cell["beat"] == peer.cell.get("beat") else now
                peer.cell = cell

    def _preside(self, now: float) -> None:
        """Decide what follows from what all ranks say."""
        cells = {0: self._cell, **{rank: peer.cell for rank, peer in sorted(self._peers.items())}}
        self.stop_signal = self.stop_signal or next((cell["stop"] for cell in cells.values() if cell.get("stop")), 0)
        self._chair.hear(cells, self._beat, now, ended=self.cause is not None)
        board = self._chair.board
        if board["complete"]:
            self._complete.set()
        left = all(peer.cell.get("gone") or peer.ending for peer in self._peers.values())
        if left and (self.cause is not None or board["done"]):
            self._gone.set()

    # --- the thread that looks at processes and clocks

    def _look_around(self) -> None:
        last = time.monotonic()
        while not (self._rests() and self.cause is None):
            now = time.monotonic()
            self._forgive_own_pause(now - last - _LOOK, now)
            last = now
            self._look_at_myself(now)
            if self.cause is None and not self._finished.is_set():
                self._look_for_ends()
                self._look_for_silence(now)
                self._settle_without_store(now)
            self._leave_if_due(time.monotonic())

    def _rests(self) -> bool:
        """Wait until it is time to look around; True if there is no more to watch."""
        if self.cause is not None:
            time.sleep(_SOON)
        return self._gone.wait(_LOOK)

    def _look_at_myself(self, now: float) -> None:
        progress = self._progress
        if progress.look(now):
            self._chair.concluded = ""
        self._note(
            action=progress.action,
            ranks=() if progress.wait is None else progress.wait.ranks,
            hangs=progress.is_overdue(now),
            stuck=progress.is_stuck(now),
            calls=progress.calls,
        )

    def _forgive_own_pause(self, pause: float, now: float) -> None:
        """Restart all waits after a pause of this thread, which may have missed messages."""
        if pause > _PAUSE:
            self._progress.forgive(pause)
        if self.limits.silence and pause > self.limits.silence / 2:
            for peer in list(self._peers.values()):
                peer.heard = now

    def _look_for_ends(self) -> None:
        for peer in list(self._peers.values()):
            if not peer.ending and not peer.finished and peer.process.state() in ENDED:
                peer.ending = peer.process.ending()
                self._wake.set()

    def _look_for_silence(self, now: float) -> None:
        """Rank 0 looks for silent ranks; if it is silent itself, or does not serve the store, the others notice."""
        suspicious = any(cell.get("suspects") for cell in (self._cell, *(peer.cell for peer in self._peers.values())))
        timeout = min(self.limits.silence, SUSPICION) if suspicious else self.limits.silence
        for rank, peer in list(self._peers.items()):
            silence = now - peer.heard
            if not timeout or (self.rank and rank) or peer.finished or silence <= timeout or peer.ending:
                continue
            state = peer.process.state()
            if state in _STARVED and silence <= _LENIENCE * self.limits.silence:
                continue
            stopped = " (it is stopped)" if state in _STOPPED else ""
            self._propose(self._found(rank, f"stopped answering {silence:.1f} s ago{stopped}"))

    def _settle_without_store(self, now: float) -> None:
        """If nobody answers, what this rank has found is the cause."""
        if self._lost and self._cell.get("done"):
            self._finished.set()
            self._gone.set()
        elif self._lost:
            peer = self._peers.get(0)
            ending = "lost the store of the job" if peer is None else peer.ending or peer.process.ending()
            own = self._cell.get("raised")
            self._adopt(Cause.of(own) if own else self._found(0, ending))
        elif self._proposed is not None and now > self._proposed[1] + ANSWER:
            self._adopt(self._proposed[0])

    def _found(self, rank: int, event: str) -> Cause:
        """A finding of this rank about another one, or about the store, as a cause."""
        peer = self._peers.get(rank)
        if peer is None:
            return Cause(rank=rank, process=self._process, action=self._progress.action, event=event)
        action = peer.cell.get("action", "")
        seconds = f", {time.monotonic() - peer.heard:.1f} s before" if action else ""
        return Cause(rank=rank, process=peer.process, action=f"{action}{seconds}", event=event)

    # --- the end

    def _adopt(self, cause: Cause) -> None:
        """Let the job end by the first cause."""
        with self._lock:
            if self.cause is not None:
                return
            self.cause = cause
        self._end_by = time.monotonic() + (self.limits.exit_grace if cause.rank == self.rank else ANSWER)
        self._announce(cause)
        self._known.set()  # comes last: the failed rank may end after this
        self._judged.set()
        self._wake.set()

    def _announce(self, cause: Cause) -> None:
        text = named_at_end(f"[rank {self.rank}] The job ends. First cause: {cause}")
        if self.rank in (0, cause.rank):
            line = "=" * 100
            hang = f"A hang was reported before. {self._chair.concluded}" if self._chair.concluded else ""
            text = "\n".join(filter(None, (line, text, cause.traceback.rstrip(), hang, line)))
        say(text)

    def _leave_if_due(self, now: float) -> None:
        if self.cause is None:
            return
        mine = self.cause.rank == self.rank
        if now >= self._end_by or (not mine and (self._gone.is_set() or self._lost)):
            if not mine:
                record_consequence(str(self.cause))
            self._before_exit()
            exit_now(self.cause.code)
