"""What users do with a trainer, as small scenarios that return facts: on two ranks, and in one process."""

from __future__ import annotations

from importlib import import_module

from tests.acceptance.scenarios.base import SCENARIOS, Scenario

_FILES = (
    "flags",
    "hooks",
    "callbacks",
    "logs",
    "feeds",
    "steps",
    "saving",
    "door",
    "idioms",
    "kept",
    "habits",
    "undivided",
    "refused",
)


def scenarios() -> dict[str, Scenario]:
    """All scenarios by name."""
    for file in _FILES:
        import_module(f"tests.acceptance.scenarios.{file}")
    return dict(SCENARIOS)
