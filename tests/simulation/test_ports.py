"""Messages that share a port: one at a time, in the simulator and in the estimate of searches."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.cluster import Cluster, Device, Link, Node
from lightning_gpp.graph import Affine
from lightning_gpp.plan import STEP, Edge, Plan, Stage
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, simulate
from lightning_gpp.simulation.simulator import Bookings, book

DEVICE = Device(name="any", memory_bytes=1, peak_flops={"float32": 1}, peak_bytes_per_second=1)


def two_arms() -> Plan:
    """Stages 0 and 1 on devices 1 and 2, and their join on device 0: 10 bytes each way and micro-batch."""
    stages = [
        Stage(name=f"s{i}", modules=(f"m{i}",) if i < 2 else (STEP,), devices=((1,), (2,), (0,))[i], micro_batch_size=1)
        for i in range(3)
    ]
    edges = tuple(Edge(src=src, dst=2, bytes=Affine(10)) for src in (0, 1))
    return Plan(stages=tuple(stages), edges=edges, batch_size=1)


def makespan(shared: str) -> float:
    """One micro-batch, forward and backward 1 s each, links of 10 bytes/s: a transfer takes 1 s."""
    cluster = Cluster.uniform(DEVICE, 3, Link(bytes_per_second=10, shared=shared))
    plan = two_arms()
    return simulate(compile_program(plan), replace(StageCosts.uniform(plan), cluster=cluster)).makespan


def test_a_join_receives_one_message_after_the_other() -> None:
    assert makespan("pair") == 1 + 1 + 2 + 1 + 1
    assert makespan("device") == 1 + 2 + 2 + 2 + 1


def test_a_network_card_is_shared_by_the_devices_of_a_node() -> None:
    inside, between = Link(), Link(bytes_per_second=10, shared="node")
    cluster = Cluster.of_nodes("two", [Node(device=DEVICE, count=2, link=inside)] * 2, between)
    assert cluster.ports(0, 1) == (("pair", 0, 1),)
    assert cluster.ports(0, 2) == cluster.ports(1, 3) == (("out", 1, 0), ("in", 1, 1))
    assert cluster.contended
    assert not Cluster.uniform(DEVICE, 2, Link()).contended


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5), st.booleans(), st.booleans()), max_size=15))
def test_no_two_messages_hold_a_port_at_once(messages: list[tuple[int, int, bool, bool]]) -> None:
    ports = (Bookings(), Bookings())
    taken: tuple[set[int], set[int]] = (set(), set())
    for start, seconds, first, second in messages:
        used = [index for index, flag in enumerate((first, second)) if flag]
        begin = int(book([ports[index] for index in used], start, seconds))
        assert begin >= start
        times = set(range(begin, begin + seconds))
        for index in used:
            assert taken[index].isdisjoint(times)
            taken[index].update(times)
