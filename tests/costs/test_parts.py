"""The part of a member: divided parameters and work, and inside of regions divided results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.cluster import Device
from lightning_gpp.costs.model import Roofline
from lightning_gpp.costs.tensor_parallel import MemberCosts
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.graph.parts import inside, part_of
from tests.planning.graphs import Builder

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e9)
DIVIDED = {"block.up.weight": 0, "block.down.weight": 1, "head.weight": 0}


def detail() -> OperatorGraph:
    """norm, up, gelu, down and a sum in a block; a head whose result is whole."""
    build = Builder()
    x = build.linear("block.norm", build.data(), work=0.1)
    down = build.linear("block.down", build.call("block", build.linear("block.up", x)))
    return build.step(build.linear("head", build.call("block", x, down)))


def regions() -> OperatorGraph:
    """The same with the block as one operator."""
    build, inner = Builder(), detail()
    names = [f"block.{name}.weight" for name in ("norm", "up", "down")]
    for name in names:
        build.graph.parameter_bytes[name] = inner.parameter_bytes[name]
        build.graph.parameter_sizes[name] = inner.parameter_sizes[name]
    block = build.call("block", build.data(), flops=2.1e6, parameters=names)
    graph = build.step(build.linear("head", block))
    return replace(graph, divided=DIVIDED, regions=frozenset({"block"}), detail=inner)


def test_one_process_has_all() -> None:
    graph = regions()
    assert part_of(graph, 1) is graph
    assert part_of(part_of(graph, 4), 2).parameter_bytes == part_of(graph, 4).parameter_bytes


def test_results_inside_of_a_region_are_divided_between_its_matrices() -> None:
    """What an operator saves is divided if what it reads is."""
    part = part_of(regions(), 4)
    assert part.detail is not None
    norm, up, gelu, down, total = (each for each in part.detail if each.module.startswith("block"))
    assert [spec.bytes(1) for each in (norm, up, down, gelu, total) for spec in each.outputs] == [256, 64, 256, 64, 256]
    assert [each.saved_bytes.at(1) for each in (norm, up, gelu, down, total)] == [256, 256, 64, 64, 256]
    assert [each.flops.at(1) for each in (norm, up, down)] == [1e5, 2.5e5, 2.5e5]


def test_a_region_has_the_parts_of_the_operators_inside() -> None:
    graph = regions()
    part = part_of(graph, 4)
    block, head = (part[each.name] for each in graph if each.module in ("block", "head"))
    assert len(inside(graph, graph[block.name])) == 5
    assert (block.flops.at(1), block.saved_bytes.at(1)) == (6e5, 2 * 64 + 3 * 256)
    assert (head.flops.at(1), head.saved_bytes.at(1)) == (2.5e5, 256)
    assert part.parameter_bytes["block.up.weight"] == graph.parameter_bytes["block.up.weight"] / 4
    assert part.parameter_bytes["block.norm.weight"] == graph.parameter_bytes["block.norm.weight"]


def test_a_region_takes_as_long_as_the_operators_inside() -> None:
    """So plans that cut inside of regions and plans that do not are compared fairly."""
    graph, roofline = regions(), Roofline(detail())
    block = next(each for each in graph if each.module == "block")
    wanted = [roofline.seconds(each, 3, DEVICE) for each in inside(graph, block)]
    found = MemberCosts(graph).seconds(block, 3, DEVICE)
    assert found == pytest.approx([sum(column) for column in zip(*wanted, strict=True)])


def test_a_region_that_is_called_twice_has_half_of_them_each_time() -> None:
    build, twice = Builder(), Builder()
    x, y = build.data(), twice.data()
    for _ in range(2):
        x = build.linear("block.up", x)
        y = twice.linear("block", y, parameter="block.up.weight")
    inner = build.step(x)
    graph = replace(twice.step(y), divided={"block.up.weight": 0}, regions=frozenset({"block"}), detail=inner)
    calls = [each for each in graph if each.module == "block"]
    assert sum(part_of(graph, 2)[each.name].flops.at(1) for each in calls) == 1e6
    found = sum(MemberCosts(graph).seconds(each, 1, DEVICE).forward for each in calls)
    layers = [each for each in inner if each.module == "block.up"]
    assert found == pytest.approx(sum(Roofline(inner).seconds(each, 1, DEVICE).forward for each in layers))


def test_without_a_backward_nothing_is_saved_inside() -> None:
    graph = regions().for_inference()
    assert graph.detail is not None
    assert not any(each.saved_bytes.at(1) for each in graph.detail)
