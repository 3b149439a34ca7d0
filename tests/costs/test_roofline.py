"""Seconds of operators by hand, on a device with 1 MFLOP/s, 1 MB/s and 0.25 s per call."""

from __future__ import annotations

import pytest

from lightning_gpp.cluster import Device
from lightning_gpp.costs.model import Roofline, Seconds, has_backward
from lightning_gpp.graph import OperatorGraph
from tests.planning.graphs import Builder, chain

DEVICE = Device(
    name="test",
    memory_bytes=1e9,
    peak_flops={"float32": 2e6, "bfloat16": 8e6},
    peak_bytes_per_second=2e6,
    flops_efficiency=0.5,
    bytes_efficiency=0.5,
    seconds_per_operator=0.25,
)


def _seconds(graph: OperatorGraph, name: str, num_samples: int = 2) -> Seconds:
    return Roofline(graph).seconds(graph[name], num_samples, DEVICE)


def test_arithmetic_bound() -> None:
    build = Builder()
    name = build.call("a", build.data(width=1), width=1, flops=3e6)
    assert _seconds(build.graph, name).forward == pytest.approx(0.25 + 6)


def test_memory_bound_counts_inputs_outputs_and_parameters() -> None:
    build = Builder()
    name = build.linear("a", build.data(width=100), width=100, work=0.001)
    build.graph.parameter_bytes["a.weight"] = 40_000
    moved = 4 * 100 * 5 + 4 * 100 * 5 + 40_000
    assert _seconds(build.graph, name, 5).forward == pytest.approx(0.25 + moved / 1e6)


def test_lookups_read_no_more_of_their_table_than_they_write() -> None:
    build = Builder()
    name = build.linear("embedding", build.data(width=1), width=100, work=0)
    build.graph.parameter_bytes["embedding.weight"] = 40_000
    assert _seconds(build.graph, name, 5).forward == pytest.approx(0.25 + (4 * 5 + 2 * 4 * 100 * 5) / 1e6)


def test_the_peak_of_the_outputs_data_type_counts() -> None:
    build = Builder()
    name = build.call("a", build.data(width=1), width=1, flops=8e6, dtype="bfloat16")
    assert _seconds(build.graph, name, 1).forward == pytest.approx(0.25 + 2)


def test_a_backward_without_parameters_takes_two_forwards() -> None:
    build = Builder()
    x = build.linear("a", build.data(width=1), width=1)
    name = build.call("b", x, width=1, flops=1e6)
    assert _seconds(build.graph, name) == pytest.approx((2.25, 4.5, 0))


def test_a_weight_gradient_takes_a_forward_and_its_sum() -> None:
    """1 MFLOP per sample and 4 MB of weights: 4 s to read them, 12 s to add two tensors of that size to a third."""
    build = Builder()
    first = build.linear("a", build.data(width=1000), width=1000)
    second = build.linear("b", first, width=1000)
    forward = 0.25 + 4 + 2 * 2 * 4000 / 1e6
    assert _seconds(build.graph, second) == pytest.approx((forward, forward, forward + 12))
    assert _seconds(build.graph, first) == pytest.approx(
        (forward, 0, forward + 12)
    )  # nothing wants the data's gradient
    assert _seconds(build.graph, second).backward == pytest.approx(2 * forward + 12)


def test_frozen_operators_have_no_backward() -> None:
    build = Builder()
    build.graph.parameter_bytes["frozen.weight"] = build.graph.parameter_sizes["frozen.weight"] = 10
    frozen = build.call("frozen", build.data(), parameters=["frozen.weight"], grad=False, flops=1e6)
    assert _seconds(build.graph, frozen).backward == 0
    assert not has_backward(build.graph[frozen])
    head = build.linear("head", frozen)
    assert _seconds(build.graph, head).input_gradient == 0
    assert _seconds(build.graph, head).weight_gradient > 0


def test_equal_operators_are_told_apart_by_what_they_read_and_hold() -> None:
    """Costs are kept per kind of operator: repeated blocks share them, others do not."""
    build = Builder()
    narrow, wide = build.data(width=10), build.data(width=10_000)
    first, second = (build.call("a", x, width=10) for x in (narrow, wide))
    small = build.linear("small", narrow, width=10, parameter="p")
    large = build.linear("large", narrow, width=10, parameter="q")
    build.graph.parameter_bytes["q"] = 10**6
    model = Roofline(build.graph)
    seconds = {name: model.seconds(build.graph[name], 2, DEVICE) for name in (first, second, small, large)}
    assert seconds[first] < seconds[second]
    assert seconds[small] < seconds[large]
    fresh = {name: _seconds(build.graph, name) for name in seconds}
    assert seconds == fresh


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_of_a_micro_batch_take_no_less_in_sum(parts: int) -> None:
    """What the lower bound of plans stands on."""
    graph = chain(2)
    model = Roofline(graph)
    for operator in graph:
        whole, part = (sum(model.seconds(operator, number, DEVICE)) for number in (24, 24 // parts))
        assert parts * part >= whole
