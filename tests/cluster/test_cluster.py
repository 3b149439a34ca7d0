from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.cluster import Cluster, Device, Level, Link, Node
from lightning_gpp.errors import ConfigError

SLOW = Device(name="slow", memory_bytes=8e9, peak_flops={"float32": 1e12}, peak_bytes_per_second=1e11)
FAST = Device(
    name="fast", memory_bytes=16e9, peak_flops={"float32": 4e12, "bfloat16": 32e12}, peak_bytes_per_second=1e12
)
INSIDE = Link(latency=1e-6, bytes_per_second=100e9)
OTHER_INSIDE = Link(latency=2e-6, bytes_per_second=10e9)
BETWEEN = Link(latency=5e-6, bytes_per_second=1e9)
MIXED = Cluster.of_nodes(
    "mixed",
    [
        Node(device=FAST, count=2, link=INSIDE),
        Node(device=SLOW, count=3, link=OTHER_INSIDE),
        Node(device=FAST, count=1, link=INSIDE),
    ],
    BETWEEN,
)


def test_a_device_sustains_a_fraction_of_its_peaks() -> None:
    device = replace(FAST, flops_efficiency=0.25, bytes_efficiency=0.5)
    assert device.flops_per_second("bfloat16") == 8e12
    assert device.flops_per_second() == 1e12
    assert device.bytes_per_second == 0.5e12


def test_an_unknown_data_type_falls_back_to_float32_then_to_the_lowest_peak() -> None:
    device = replace(FAST, flops_efficiency=1)
    assert device.flops_per_second("float64") == 4e12
    assert replace(device, peak_flops={"int8": 9e12, "float16": 7e12}).flops_per_second("float64") == 7e12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 0}, r"Device 'fast': memory_bytes=0 must be above 0"),
        ({"peak_flops": {}}, "peak_flops is empty; give at least float32"),
        ({"peak_flops": {"float16": -1}}, r"peak_flops\['float16'\]=-1 must be above 0 FLOP/s"),
        ({"bytes_efficiency": 0}, "bytes_efficiency=0 must be above 0 and at most 1"),
        ({"seconds_per_operator": -1}, "seconds_per_operator=-1 must be 0 or above"),
    ],
)
def test_figures_of_a_device_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(FAST, **changes)


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1, 1), (0, 0), (nan, 1), (0, nan), (0, -inf)])
def test_figures_of_a_link_are_checked(latency: float, bandwidth: float) -> None:
    wrong = "latency=.* must not be below 0" if not latency >= 0 else "bytes_per_second=.* must be above 0"
    with pytest.raises(ConfigError, match=rf"^Link: {wrong}\."):
        Link(latency=latency, bytes_per_second=bandwidth)


def test_nodes_of_different_kinds() -> None:
    assert MIXED.kinds == (FAST, SLOW)
    assert not MIXED.homogeneous
    assert [MIXED.kind(device) for device in range(6)] == [0, 0, 1, 1, 1, 0]
    assert [MIXED.node_of(device) for device in range(6)] == [0, 0, 1, 1, 1, 2]
    assert MIXED.devices[3] is SLOW


@pytest.mark.parametrize(
    ("src", "dst", "link"),
    [(0, 1, INSIDE), (1, 2, BETWEEN), (3, 4, OTHER_INSIDE), (4, 2, OTHER_INSIDE), (5, 0, BETWEEN), (2, 2, Link())],
)
def test_the_innermost_level_that_holds_both_joins_them(src: int, dst: int, link: Link) -> None:
    assert MIXED.link(src, dst) == link


def test_a_link_of_one_pair_comes_first_and_has_a_direction() -> None:
    cluster = replace(MIXED, links={**MIXED.links, (0, 1): BETWEEN})
    assert (cluster.link(0, 1), cluster.link(1, 0)) == (BETWEEN, INSIDE)


def test_three_levels() -> None:
    rack = Link(latency=9e-6, bytes_per_second=1e8)
    levels = (
        Level(link=INSIDE, groups=(0, 0, 1, 1, 2, 2)),
        Level(link=BETWEEN, groups=(0, 0, 0, 0, 1, 1)),
        Level(link=rack, groups=(0,) * 6),
    )
    cluster = Cluster(name="racks", devices=(FAST,) * 6, levels=levels)
    assert [cluster.link(0, dst) for dst in range(1, 6)] == [INSIDE, BETWEEN, BETWEEN, rack, rack]


def test_all_reduce_goes_round_a_ring_at_the_pace_of_its_slowest_link() -> None:
    assert MIXED.all_reduce_seconds([3], 1e9) == 0
    assert MIXED.all_reduce_seconds([0, 1], 1e9) == pytest.approx(2 * (1e-6 + 0.5e9 / 100e9))
    assert MIXED.all_reduce_seconds([2, 3, 4], 3e9) == pytest.approx(4 * (2e-6 + 1e9 / 10e9))
    assert MIXED.all_reduce_seconds([0, 1, 2, 3], 4e9) == pytest.approx(6 * (5e-6 + 1e9 / 1e9))


@given(st.permutations(range(6)), st.integers(1, 6))
def test_a_subset_renumbers_devices_and_keeps_their_links(order: list[int], size: int) -> None:
    chosen = order[:size]
    cluster = replace(MIXED, links={**MIXED.links, (0, 5): INSIDE}).subset(chosen)
    for new, old in enumerate(chosen):
        assert cluster.devices[new] is MIXED.devices[old]
        assert cluster.node_of(new) == MIXED.node_of(old)
        for new_other, old_other in enumerate(chosen):
            expected = INSIDE if (old, old_other) == (0, 5) else MIXED.link(old, old_other)
            assert cluster.link(new, new_other) == expected


@pytest.mark.parametrize("devices", [[0, 0], [6], [-1]])
def test_a_subset_names_each_device_once(devices: list[int]) -> None:
    with pytest.raises(ConfigError, match="'mixed': each must be named once and be between 0 and 5"):
        MIXED.subset(devices)


def test_clusters_travel_and_are_keys() -> None:
    assert pickle.loads(pickle.dumps(MIXED)) == MIXED
    assert copy.deepcopy(MIXED) == MIXED
    assert len({MIXED, copy.deepcopy(MIXED)}) == 1
    assert replace(MIXED, links={}) != MIXED


def test_levels_and_links_fit_the_devices() -> None:
    with pytest.raises(ConfigError, match=r"levels\[0\]\.groups has 2 numbers for 3 devices"):
        Cluster(name="c", devices=(FAST,) * 3, levels=(Level(link=INSIDE, groups=(0, 0)),))
    for pair in [(0, 3), (1, 1), (-1, 0)]:
        with pytest.raises(ConfigError, match=rf"links\[{pair[0]}, {pair[1]}\] must join two different devices"):
            replace(Cluster.uniform(FAST, 3), links={pair: INSIDE})


def test_every_pair_is_joined_in_both_directions() -> None:
    nodes = [Node(device=FAST, count=1), Node(device=SLOW, count=1)]
    with pytest.raises(ConfigError, match="no link joins device 0 to device 1. Give `between`"):
        Cluster.of_nodes("apart", nodes)
    with pytest.raises(ConfigError, match="no link joins device 1 to device 0"):
        Cluster(name="one way", devices=(FAST, SLOW), levels=(), links={(0, 1): INSIDE})
    cluster = Cluster(name="pair", devices=(FAST, SLOW), levels=(), links={(0, 1): INSIDE, (1, 0): BETWEEN})
    assert [cluster.node_of(device) for device in range(2)] == [0, 1]
