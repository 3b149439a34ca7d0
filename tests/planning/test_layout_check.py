"""Layouts that a schedule is made for are known whatever their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_gpp.plan import Plan
from lightning_gpp.planning.assignment.layout import laid_out
from lightning_gpp.planning.assignment.layout_check import layout_mismatch
from lightning_gpp.schedules.registry import SCHEDULES, register_schedule
from tests.strategies import chain, towers


@pytest.fixture(autouse=True)
def folded() -> Iterator[None]:
    """1F1B, made for two stages on each device that lie forth and back, and for both directions."""
    method = SCHEDULES.entries["1f1b"]
    register_schedule("folded", layout="zigzag", stages_per_device=2)(method.generate)
    register_schedule("twofold", bidirectional=True)(method.generate)
    yield
    del SCHEDULES.entries["folded"], SCHEDULES.entries["twofold"]


def test_a_layout_is_known_whatever_its_numbers() -> None:
    plan = chain([1] * 9, 8)
    zigzag, looped = laid_out(plan, 4, "zigzag"), laid_out(plan, 4, "looped")
    assert not layout_mismatch(zigzag, "folded")
    assert "back and forth over the devices, one device each" in layout_mismatch(looped, "folded")
    assert not layout_mismatch(laid_out(towers(2, 3, 4), 3, "zigzag"), "folded")


def mirrored(plan: Plan) -> Plan:
    last = plan.num_devices - 1
    places = [(stage.devices[0], last - stage.devices[0]) for stage in plan.stages]
    stages = (replace(s, devices=place, round_robin=True) for s, place in zip(plan.stages, places, strict=True))
    return replace(plan, stages=tuple(stages))


def test_pipelines_both_ways_take_plans_both_ways_two_devices_and_two_micro_batches() -> None:
    plan = chain([1] * 4, 8)
    assert layout_mismatch(plan, "twofold")
    assert not layout_mismatch(mirrored(plan), "twofold")
    single = replace(chain([1], 8), stages=(replace(chain([1], 8).stages[0], modules=("all", "@step")),))
    assert "which takes 2 devices or more" in layout_mismatch(single, "twofold")
    whole = mirrored(chain([8] * 4, 8))
    assert "which takes 2 micro-batches or more" in layout_mismatch(whole, "twofold")
    assert not layout_mismatch(replace(whole, batch_size=16), "twofold")
