"""Copies to and from the host in simulations: times and memory by hand, pictures and files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.cluster import Cluster, Device
from lightning_gpp.graph import Affine
from lightning_gpp.plan import Figures, Plan
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, Timeline, simulate, trace_of
from tests.strategies import chain, offloading

DEVICE = Device(
    name="test",
    memory_bytes=1e9,
    peak_flops={"float32": 1e9},
    peak_bytes_per_second=1e9,
    peak_host_bytes_per_second=4.0,
    bytes_efficiency=0.5,
)
COST = Figures(
    forward_seconds=Affine(1),
    input_seconds=Affine(2),
    activation_bytes=Affine(1),
    offloaded_bytes=Affine(3),
    parameter_bytes=5,
)


def simulated(plan: Plan, device: Device = DEVICE, cost: Figures = COST) -> Timeline:
    cluster = Cluster.uniform(device, plan.num_devices)
    costs = StageCosts(stages=(cost,) * len(plan.stages), cluster=cluster, parameter_copies=2)
    return simulate(compile_program(plan), costs)


GPIPE = chain((1,), 4, "gpipe")
"""F0 O0 F1 O1 F2 O2 L0 F3 O3 L1 B0 L2 B1 L3 B2 B3; a copy of 3 bytes takes 1.5 seconds."""


def test_times_by_hand() -> None:
    timeline = simulated(offloading(GPIPE))
    spans = {str(span.action): (span.start, span.stop) for span in timeline.devices[0]}
    copies = {str(copy.action): (copy.start, copy.stop) for copy in timeline.host_copies}
    assert spans == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "0F2": (2.5, 3.5),  # after O0
        "0F3": (4, 5),  # after O1
        "0B0": (5.5, 7.5),  # after O2 and L0
        "0B1": (7.5, 9.5),
        "0B2": (9.5, 11.5),
        "0B3": (11.5, 13.5),
    }
    assert copies == {
        "0O0": (1, 2.5),
        "0O1": (2.5, 4),  # the lane out is busy until 2.5
        "0O2": (4, 5.5),
        "0O3": (5.5, 7),
        "0L0": (4, 5.5),  # into the memory that O1 frees
        "0L1": (5.5, 7),
        "0L2": (7.5, 9),
        "0L3": (9.5, 11),
    }
    assert {copy.num_bytes for copy in timeline.host_copies} == {3}
    assert timeline.makespan == 13.5
    assert timeline.busy == (12,)


def test_memory_by_hand() -> None:
    """5 bytes of parameters and their gradients, 1 byte of inputs for each of 4 micro-batches, and 3 x 3 bytes."""
    kept, moved = simulated(GPIPE), simulated(offloading(GPIPE))
    assert kept.peak_bytes == (10 + 4 * (1 + 3),)
    assert moved.peak_bytes == (10 + 4 * 1 + 3 * 3,)


def test_what_is_loaded_at_once_never_leaves() -> None:
    """F0 O0 L0 B0: copies out, which nothing waits for, and none back."""
    timeline = simulated(offloading(chain((1,), 3, "1f1b")))
    assert [str(copy.action) for copy in timeline.host_copies] == ["0O0", "0O1", "0O2"]
    assert timeline.makespan == 9
    assert timeline.peak_bytes == (10 + 4,)


@pytest.mark.parametrize(("bytes_per_second", "seconds"), [(12.0, 12), (6.0, 12), (3.0, 14)])
def test_copies_hide_behind_forwards_and_backwards(bytes_per_second: float, seconds: float) -> None:
    """Copies of 0.5, 1 and 2 seconds, forwards of 1 and backwards of 2."""
    device = replace(DEVICE, peak_host_bytes_per_second=bytes_per_second)
    plan = offloading(GPIPE)
    assert simulated(plan, device).makespan == pytest.approx(seconds if seconds == 12 else 15)


def test_traces_have_the_copies() -> None:
    events = trace_of(simulated(offloading(GPIPE))).events
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    named = {(event["name"], threads[event["tid"]]) for event in events if event.get("cat") in ("offload", "load")}
    assert ("0O1", "copies to the host") in named
    assert ("0L1", "copies from the host") in named
    assert len(named) == 8
