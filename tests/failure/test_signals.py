"""Signals become a flag, which is read between two steps; Ctrl-C that comes to a process twice at once counts once."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_gpp.failure import signals
from lightning_gpp.failure.signals import StopFlag
from tests.failure.pipeline_rank import Rank, job


def fail(number: signal.Signals) -> None:
    raise AssertionError(f"{number} was answered")


def test_the_first_instant_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that arrives as soon as there is a handler for it is heard of."""
    heard, install = threading.Event(), signal.signal

    def installed(number: int, handler: Any) -> Any:
        before = install(number, handler)
        monkeypatch.undo()
        signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", installed)
    with StopFlag(overdue=fail, heard=lambda number: heard.set()) as flag:
        assert heard.wait(5)
        flag.answer()


def stuck_in_a_receive(rank: Rank) -> None:
    def report(number: signal.Signals) -> None:
        rank.monitor.report(RuntimeError(f"received {number.name}, and no step ended since"))

    with StopFlag(overdue=report, patience=0.5):
        print("ready", flush=True)
        if rank.rank == 2:
            time.sleep(60)
        rank.exchange()


def test_a_signal_ends_a_job_that_hangs(tmp_path: Path) -> None:
    with job(tmp_path, stuck_in_a_receive) as running:
        running.wait_for("ready")
        os.kill(running.pids[1], signal.SIGTERM)
        running.wait(20)
    assert all(running.codes)
    for rank in range(3):
        assert "First cause: rank 1" in running.output(rank)
        assert "RuntimeError: received SIGTERM, and no step ended since" in running.output(rank)


def test_previous_handlers_come_back() -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    with StopFlag(overdue=fail) as flag:
        signal.raise_signal(signal.SIGUSR1)
        assert flag.received is signal.SIGUSR1
        signal.raise_signal(signal.SIGTERM)
        assert flag.received is signal.SIGUSR1, "the first counts"
        flag.answer()
    assert {each: signal.getsignal(each) for each in before} == before
    assert signal.set_wakeup_fd(-1) == -1


def test_forked_workers_end_by_the_signal_and_do_not_set_the_flag() -> None:
    overdue = threading.Event()
    with StopFlag(overdue=lambda number: overdue.set(), patience=0.1) as flag:
        worker = os.fork()
        if worker == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(worker, signal.SIGTERM)
        _, status = os.waitpid(worker, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not overdue.wait(0.4)
        assert flag.received is None


def test_the_echo_of_an_interrupt_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_ECHO", 0.2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopFlag(overdue=fail):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.3)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
