from math import inf

import networkx as nx
import pytest

from lightning_gpp.cluster import Device
from lightning_gpp.costs.model import Roofline
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning.problem.units import UnitGraph, find_units
from tests.planning import graphs

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e9)
FAMILIES = {
    "chain": graphs.chain,
    "two_towers": graphs.two_towers,
    "feature_towers": graphs.feature_towers,
    "encoder_decoder": graphs.encoder_decoder,
    "unet": graphs.unet,
    "gpt": graphs.gpt,
    "shared_block": graphs.shared_block,
}


def units_of(graph: OperatorGraph, num_pieces: float) -> UnitGraph:
    costs = Roofline(graph)
    seconds = {operator.name: sum(costs.seconds(operator, 4, DEVICE)) for operator in graph}
    return find_units(graph, num_pieces=num_pieces, seconds=seconds)


def modules_of(units: UnitGraph) -> list[tuple[str, ...]]:
    return [unit.modules for unit in units.units]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_pieces", [1, 2, 4, inf])
def test_units_form_a_dag_in_order_and_hold_every_parameter(name: str, num_pieces: float) -> None:
    graph = FAMILIES[name]()
    units = units_of(graph, num_pieces)
    assert all(src < dst for src, dst in units.graph().edges)
    assert nx.is_directed_acyclic_graph(units.graph())
    assert "@step" in units.units[-1].modules
    tied = 1 if name == "gpt" else 0  # the tied weight counts in the embedding and in the head
    extra = tied * graph.parameter_bytes.get("transformer.wte.weight", 0)
    assert sum(unit.parameter_bytes for unit in units.units) == sum(graph.parameter_bytes.values()) + extra


def test_heavy_modules_are_divided() -> None:
    units = units_of(graphs.two_towers(num_blocks=2), 3)
    assert modules_of(units) == [
        ("image_tower.blocks.0",),
        ("image_tower.blocks.1",),
        ("text_tower.blocks.0",),
        ("text_tower.blocks.1",),
        ("head", "@step"),
    ]
    assert sorted(units.graph().edges) == [(0, 1), (1, 4), (2, 3), (3, 4)]


def test_modules_without_parameters_join_what_they_read() -> None:
    units = units_of(graphs.feature_towers(num_towers=1), inf)
    assert units.units[0].modules == ("towers.0.0", "towers.0.1")


def test_a_module_used_between_others_is_merged_with_them() -> None:
    merged = {frozenset(modules) for modules in modules_of(units_of(graphs.shared_block(), inf))}
    assert merged == {
        frozenset({"layers.0"}),
        frozenset({"layers.1", "layers.2", "shared"}),
        frozenset({"head", "@step"}),
    }


def test_modules_in_one_cluster_are_one_unit() -> None:
    build = graphs.Builder()
    x = build.linear("block.a", build.data(), cluster="tied")
    x = build.linear("block.b", x, cluster="tied")
    graph = build.step(build.linear("head", x))
    assert modules_of(units_of(graph, inf)) == [("block",), ("head", "@step")]


def test_the_step_joins_the_unit_that_nothing_follows() -> None:
    """The step reads more bytes of the encoder, but the decoder waits for the encoder: joining it would be a cycle."""
    build = graphs.Builder()
    latent = build.linear("encoder", build.data(), width=512)
    graph = build.step(latent, build.linear("decoder", latent, width=8))
    assert modules_of(units_of(graph, inf)) == [("encoder",), ("decoder", "@step")]


def test_values_of_frozen_parts_go_one_way() -> None:
    build = graphs.Builder()
    frozen = build.call("frozen", build.data(), parameters=["frozen.weight"], grad=False, flops=1e6)
    build.graph.parameter_bytes["frozen.weight"] = build.graph.parameter_sizes["frozen.weight"] = 10
    middle = build.linear("middle", frozen)
    units = units_of(build.step(build.linear("head", middle)), inf)
    assert [(value.src, value.dsts, value.num_directions) for value in units.values] == [(0, (1,), 1), (1, (2,), 2)]
    assert [value.bytes.at(3) for value in units.values] == [3 * 256, 3 * 256]
