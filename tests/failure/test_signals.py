"""Signals become a flag, which is read between two steps; Ctrl-C that comes to a process twice at once counts once."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from lightning_gpp.failure import signals
from lightning_gpp.failure.signals import StopFlag


def test_the_first_instant_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that arrives as soon as there is a handler for it is heard of."""
    heard, install = threading.Event(), signal.signal

    def installed(number: int, handler: Any) -> Any:
        before = install(number, handler)
        monkeypatch.undo()
        signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", installed)
    with StopFlag(lambda number: heard.set()) as flag:
        assert heard.wait(5)
        flag.answer()


def test_previous_handlers_come_back() -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    with StopFlag() as flag:
        signal.raise_signal(signal.SIGUSR1)
        assert flag.received is signal.SIGUSR1
        signal.raise_signal(signal.SIGTERM)
        assert flag.received is signal.SIGUSR1, "the first counts"
        flag.answer()
    assert {each: signal.getsignal(each) for each in before} == before
    assert signal.set_wakeup_fd(-1) == -1


def test_forked_workers_end_by_the_signal_and_do_not_set_the_flag() -> None:
    heard = threading.Event()
    with StopFlag(lambda number: heard.set()) as flag:
        worker = os.fork()
        if worker == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(worker, signal.SIGTERM)
        _, status = os.waitpid(worker, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not heard.wait(0.4)
        assert flag.received is None


def test_the_echo_of_an_interrupt_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_ECHO", 0.2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopFlag():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.3)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
