"""The watcher: a thread that watches other ranks while the main thread computes or waits, and ends the process."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Final

from lightning_gpp.failure import torchrun
from lightning_gpp.failure.cause import EXIT_CODE, Cause
from lightning_gpp.failure.exceptions import Exceptions, Verdict
from lightning_gpp.failure.hangs import Activity, HangReports
from lightning_gpp.failure.links import PeerLink, PeerMessage
from lightning_gpp.failure.processes import ProcessIdentity, exit_now, forget_in_workers, say
from lightning_gpp.failure.stuck import Standing, Standstill, lonely_call

_OTHERS_GRACE: Final = 1.0
"""Seconds for other ranks to end by themselves before rank 0 kills those on its host and ends, too."""

_PAUSE: Final = 5.0
"""Seconds without a tick after which this thread counts as having been stopped."""
_STOPPED: Final = ("T", "t")
_STARVED: Final = ("R", "S", "D")
"""States of a process that is there, and silent: it waits for a processor, for memory or for a disk."""
_LENIENCE: Final = 5
"""Times the timeout that such a process may be silent: the time in which all ranks must have ended after a failure."""


class Watcher(threading.Thread):
    """Owns the links of one rank: detects failures of their peers, passes on the first cause, and ends the process.

    Rank 0 has a link to every other rank, the others have one to rank 0, which tells all what any of them detects. The
    first cause is the one that arrives at rank 0 first. After an exception rank 0 waits a moment: if all ranks raise
    their own, nobody is stuck, and the watch goes on.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        links: dict[int, PeerLink],
        timeout: float,
        activity: Activity,
        exit_grace: float,
        hangs: HangReports,
    ) -> None:
        super().__init__(name="gpp-failure-monitor", daemon=True)
        self.rank = rank
        self.cause: Cause | None = None
        self.known = threading.Event()
        """Set after `cause` is known and printed."""
        self.verdict: Verdict | None = None
        """The consequence of the exception that this rank has submitted; None as long as it is open."""
        self.first: Cause | None = None
        """The exception that was reported first of those with this consequence."""
        self.judged = threading.Event()
        """Set after `verdict` is known."""
        self.stop_signal = 0
        """On rank 0 the first signal that asks the job to stop, received by any rank; 0 if there is none."""
        self.asked_to_finish = False
        """On rank 0 True if any rank wants the job to end regularly."""
        self._links = links
        self._timeout = timeout
        self._describe, self._wait, self._hangs = activity.describe, activity.wait, hangs
        self._standing = Standing()
        self._exit_grace = exit_grace
        self._interval = min(max(timeout / 8, 0.05), 0.5)
        self._submitted: Cause | None = None
        self._exceptions, self._world_size = Exceptions(world_size), world_size
        self._end_by = float("inf")
        self._last_tick = time.monotonic() - self._interval  # the first one is due
        self._open()

    def add(self, link: PeerLink) -> None:
        """Watch over one more rank, from another thread: on rank 0 the others come one by one."""
        self._post(partial(self._add, link))

    def submit(self, cause: Cause) -> None:
        """Report a failure of this rank, from another thread."""
        self.verdict = None
        self.judged.clear()
        self._post(partial(self._submit, cause))

    def ask_to_stop(self, number: int) -> None:
        """Tell rank 0 of a signal that asks the job to stop, from another thread."""
        self._post(partial(self._ask, number))

    def ask_to_finish(self) -> None:
        """Tell rank 0 that this rank wants the job to end regularly, from another thread."""
        self._post(self._ask_to_finish)

    def finish(self, patience: float) -> None:
        """Report the regular end of this rank, from another thread. Returns when all have ended, or after `patience`.

        Until then a rank that is stopped is noticed: rank 0 waits for all others, which wait for its word that all have
        finished. If rank 0 ends without it, all that they had to do is done.
        """
        self._post(partial(self._finish, patience))
        self.join(patience + 2.0)

    def catch_up(self, seconds: float) -> None:
        """Wait, in another thread, until all is done that was asked for before."""
        done = threading.Event()
        self._post(done.set)
        done.wait(seconds)

    def run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # without memory, for example
            say(f"[rank {self.rank}] This process ends, as it can no longer watch over the others: {error!r}")
            exit_now(EXIT_CODE)

    def _watch(self) -> None:
        while not self._is_over():
            for key, _ in self._selector.select(max(self._last_tick + self._interval - time.monotonic(), 0)):
                key.data()
            if time.monotonic() >= self._last_tick + self._interval:
                self._tick(time.monotonic())
            self._judge_exceptions(time.monotonic())
            self._leave_if_due(time.monotonic())
        self._close()

    # --- commands of other threads

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _obey(self) -> None:
        self._woken.recv(4096)
        while not self._commands.empty():
            self._commands.get()()

    def _add(self, link: PeerLink) -> None:
        link.heard = time.monotonic()
        self._links[link.rank] = link
        self._selector.register(link.socket, selectors.EVENT_READ, partial(self._read, link))
        if self.cause is not None:
            link.send({"cause": asdict(self.cause)})

    def _submit(self, cause: Cause) -> None:
        self._submitted = cause
        if self.rank == 0 or not self._links:
            return self._consider(cause)
        return self._links[0].send({"cause": asdict(cause)})

    def _ask(self, number: int) -> None:
        self.stop_signal = self.stop_signal or number
        if self.rank != 0 and self._links:
            self._links[0].send({"stop": number})

    def _ask_to_finish(self) -> None:
        self.asked_to_finish = True
        if self.rank != 0 and self._links:
            self._links[0].send({"finish": True})

    def _finish(self, patience: float) -> None:
        self._end_by = time.monotonic() + patience
        if self.rank != 0:
            for link in self._links.values():
                link.done = True
                link.send({"done": True})

    # --- incoming messages

    def _read(self, link: PeerLink) -> None:
        messages, ended = link.receive()
        for message in messages:
            self._hear(link, message)
        if ended:
            self._lose(link)

    def _hear(self, link: PeerLink, message: PeerMessage) -> None:
        if "action" in message:
            link.action, place = message["action"], message.get("place")
            link.place = None if place is None else Standstill.of(place)
        link.done = link.done or "done" in message
        self.stop_signal = self.stop_signal or message.get("stop", 0)
        self.asked_to_finish = self.asked_to_finish or "finish" in message
        if "cause" in message:
            self._consider(Cause.of(message["cause"]))
        if "verdict" in message:
            self._conclude(Verdict[message["verdict"]], Cause.of(message["first"]))
        self._hear_of_hangs(message)

    def _lose(self, link: PeerLink) -> None:
        self._selector.unregister(link.socket)
        link.close()
        del self._links[link.rank]
        if not link.done and self.cause is None:
            self._adopt(self._submitted or self._found(link, self._silence(link) + link.process.ending()))

    def _silence(self, link: PeerLink) -> str:
        """Describe a silent peer; another rank may have killed it a moment before."""
        seconds = time.monotonic() - link.heard
        return f"stopped answering {seconds:.1f} s ago and " if self._timeout and seconds > self._timeout / 2 else ""

    # --- time

    def _tick(self, now: float) -> None:
        self._forgive_own_pause(now)
        self._last_tick = now
        if self.cause is None:
            action = self._action()
            place = self._standing.look(self._wait, now)
            for link in self._links.values():
                link.send({"action": action, "place": None if place is None else asdict(place)})
            self._look_for_hangs(action, now)
            self._look_for_lonely_calls(place)
        if self._timeout:
            self._judge(now)

    def _forgive_own_pause(self, now: float) -> None:
        """Restart all waits after a pause of this thread, which may have missed messages."""
        pause = now - self._last_tick - self._interval
        if pause > _PAUSE:
            self._hangs.forgive(pause)
        if self._timeout and now - self._last_tick > self._timeout / 2:
            for link in self._links.values():
                link.heard = now

    def _judge(self, now: float) -> None:
        for link in self._links.values():
            silence = now - link.heard
            has_finished = self.rank == 0 and link.done
            if has_finished or self.cause is not None or silence <= self._timeout:
                continue
            state = link.process.state()
            if state in _STARVED and silence <= _LENIENCE * self._timeout:
                continue
            stopped = " (it is stopped)" if state in _STOPPED else ""
            self._adopt(self._found(link, f"stopped answering {silence:.1f} s ago{stopped}"))
            link.process.kill()

    def _action(self) -> str:
        try:
            return self._describe()
        except Exception as error:  # the watch must continue whatever the caller's description raises
            return f"unknown ({error!r})"

    # --- hangs

    def _look_for_hangs(self, action: str, now: float) -> None:
        if self._hangs.is_due(action, now):
            if self.rank == 0:
                self._ask_all(now)
            elif self._links:
                self._links[0].send({"hangs": self.rank})
        self._hangs.conclude_if_due(now)

    def _look_for_lonely_calls(self, place: Standstill | None) -> None:
        """On rank 0, end the job if a rank is in a collective that others will never call."""
        if self.rank != 0 or place is None and not any(link.place for link in self._links.values()):
            return
        places = {0: place, **{rank: link.place for rank, link in self._links.items()}}
        found = lonely_call(places, frozenset(rank for rank, link in self._links.items() if link.done))
        if found is not None and len(places) == self._world_size:
            rank, event = found
            process = ProcessIdentity.current() if rank == 0 else self._links[rank].process
            action = self._action() if rank == 0 else self._links[rank].action
            self._adopt(Cause(rank=rank, process=process, action=action, event=event, reported=True))

    def _hear_of_hangs(self, message: PeerMessage) -> None:
        now = time.monotonic()
        if "hangs" in message and self.rank == 0:
            self._ask_all(now)
        if "report" in message and self._links:
            self._links[0].send({"answer": self._hangs.tell(now)})
        if "answer" in message:
            self._hangs.hear(message["answer"])

    def _ask_all(self, now: float) -> None:
        if self._hangs.begin(now):
            for link in self._links.values():
                link.send({"report": True})
            self._hangs.hear(self._hangs.tell(now))

    # --- the end

    def _found(self, link: PeerLink, event: str) -> Cause:
        action = f"{link.action}, {time.monotonic() - link.heard:.1f} s before" if link.action else ""
        return Cause(rank=link.rank, process=link.process, action=action, event=event)

    def _consider(self, cause: Cause) -> None:
        """Take in a failure. On rank 0 an exception waits for those of the other ranks; what rank 0 says is decided."""
        if self.rank == 0 and cause.point:
            self._exceptions.add(cause, time.monotonic())
        else:
            self._adopt(cause)

    def _judge_exceptions(self, now: float) -> None:
        verdict = self._exceptions.verdict(now) if self.cause is None else None
        if verdict is Verdict.ENDS and self._exceptions.first is not None:
            self._adopt(self._exceptions.first)
        elif verdict is not None and self._exceptions.first is not None:
            first = self._exceptions.first
            if self._exceptions.interrupted:
                self._announce(first)
            for link in self._links.values():
                link.send({"verdict": verdict.name, "first": asdict(first)})
            self._exceptions.clear()
            self._conclude(verdict, first)

    def _conclude(self, verdict: Verdict, first: Cause) -> None:
        self._submitted, self.verdict, self.first = None, verdict, first
        self.judged.set()

    def _adopt(self, found: Cause) -> None:
        """Let the job end. An exception that was reported before is the cause, even if it still waited for others."""
        if self.cause is not None:
            return
        self.cause = cause = self._exceptions.first or found
        for link in self._links.values():
            link.send({"cause": asdict(cause)})
        self._end_by = time.monotonic() + self._grace(cause)
        self._announce(cause)
        self.known.set()  # comes last: the failed rank may end after this
        self._conclude(Verdict.ENDS, cause)

    def _grace(self, cause: Cause) -> float:
        if cause.rank == self.rank:
            return self._exit_grace
        return _OTHERS_GRACE if self.rank == 0 else 0.0

    def _announce(self, cause: Cause) -> None:
        text = f"[rank {self.rank}] The job ends. First cause: {cause}"
        if self.rank in (0, cause.rank):
            line = "=" * 100
            hang = f"A hang was reported before. {self._hangs.concluded}" if self._hangs.concluded else ""
            text = "\n".join(filter(None, (line, text, cause.traceback.rstrip(), hang, line)))
        say(text)

    def _leave_if_due(self, now: float) -> None:
        if self.cause is None:
            return
        alone = not self._links and self.cause.rank != self.rank
        if alone or now >= self._end_by:
            self._kill_left_behind(self.cause)
            if self.cause.rank != self.rank:
                torchrun.record_consequence(str(self.cause))
            exit_now(self.cause.code)

    def _kill_left_behind(self, cause: Cause) -> None:
        for link in self._links.values():
            if self.rank == 0 and not (cause.reported and link.rank == cause.rank):
                link.process.kill()

    def _is_over(self) -> bool:
        if self.cause is not None:
            return False
        finishing = self._end_by < float("inf")
        waiting = any(not link.done for link in self._links.values()) if self.rank == 0 else bool(self._links)
        return time.monotonic() >= self._end_by or (not waiting and (finishing or self.rank != 0))

    # --- sockets

    def _open(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._obey)
        for link in self._links.values():
            self._selector.register(link.socket, selectors.EVENT_READ, partial(self._read, link))
        forget_in_workers(self)

    def _close(self) -> None:
        for link in self._links.values():
            link.send({"done": True})
        self.forget()

    def forget(self) -> None:
        """Close the sockets in a forked worker: while it has copies, other ranks do not notice the end of this one."""
        for link in self._links.values():
            link.close()
        for each in (self._wake, self._woken, self._selector):
            each.close()
