"""Tests that register schedules leave none behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_gpp.schedules import registry


@pytest.fixture(autouse=True)
def registered_before() -> Iterator[None]:
    """Afterwards the schedules are those of before."""
    before = dict(registry.SCHEDULES.entries)
    yield
    registry.SCHEDULES.entries.clear()
    registry.SCHEDULES.entries.update(before)
