"""Ctrl-C that comes to a process twice at once counts once."""

from __future__ import annotations

import signal
import time

import pytest

from lightning_gpp.failure import interrupts
from lightning_gpp.failure.interrupts import OneInterrupt


def test_the_echo_of_an_interrupt_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_ECHO", 0.2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    once = OneInterrupt()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        once.remove()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_came_later_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    once = OneInterrupt()
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Lightning does after the first
        once.remove()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
