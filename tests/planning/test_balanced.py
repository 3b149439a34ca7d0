from pathlib import Path

import pytest

from lightning_gpp.costs.roofline import CPU, H100, LOOPBACK
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Request, balanced, manual, partition, partitioner_names, register
from lightning_gpp.planning.partition import Problem
from lightning_gpp.planning.search import search
from lightning_gpp.planning.units import find_units
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import estimate, simulate
from tests.planning import graphs
from tests.planning.test_units import FAMILIES


def edges_of(plan: Plan) -> set[tuple[str, str]]:
    return {(plan.stages[edge.src].name, plan.stages[edge.dst].name) for edge in plan.edges if edge.src >= 0}


def towers_of(plan: Plan) -> dict[int, set[str]]:
    return {
        index: {module.partition(".")[0] for module in stage.modules if "tower" in module}
        for index, stage in enumerate(plan.stages)
    }


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_plans_are_complete_and_compile(name: str, num_devices: int) -> None:
    graph = FAMILIES[name]()
    plan = balanced(graph, num_devices=num_devices, batch_size=16, num_micro_batches=4)
    assert plan.num_devices == len(plan.stages) == num_devices
    assert plan.stages[plan.step_stage].devices == (0,)
    compile_program(plan)
    used = {name for operator in graph for name in operator.parameters}
    assert sum(stage.figures.num_parameters for stage in plan.stages) >= sum(graph.parameter_sizes[n] for n in used)


def test_towers_are_on_different_devices_without_an_edge() -> None:
    plan = balanced(graphs.two_towers(), num_devices=4, batch_size=32, num_micro_batches=8)
    towers = towers_of(plan)
    assert all(len(found) <= 1 for found in towers.values())
    assert plan.depth == 3
    crossing = {(min(towers[e.src]), min(towers[e.dst])) for e in plan.edges if e.src >= 0 and e.dst != plan.step_stage}
    assert crossing == {("image_tower", "image_tower")} or crossing == {("text_tower", "text_tower")} or not crossing
    assert [stage.name for stage in plan.stages] == [
        "image_tower.blocks.0-1",
        "image_tower.blocks.2-3",
        "text_tower.blocks.0-1",
        "text_tower.blocks.2-3+head",
    ]


def test_whole_towers_where_there_are_as_many_devices() -> None:
    plan = balanced(graphs.feature_towers(), num_devices=4, batch_size=32, num_micro_batches=8)
    assert edges_of(plan) == {(f"towers.{i}", "trunk") for i in range(3)}
    assert [stage.modules for stage in plan.stages] == [
        ("towers.0",),
        ("towers.1",),
        ("towers.2",),
        ("trunk", "@step"),
    ]
    assert [stage.devices for stage in plan.stages] == [(3,), (2,), (1,), (0,)]


def test_several_branches_share_a_device_where_there_are_fewer_devices() -> None:
    plan = balanced(graphs.feature_towers(num_towers=6, trunk=1), num_devices=3, batch_size=32, num_micro_batches=8)
    assert plan.depth == 2
    assert sum(len([m for m in stage.modules if m.startswith("towers")]) for stage in plan.stages) >= 6


def test_uneven_towers_are_balanced() -> None:
    plan = balanced(graphs.two_towers(num_blocks=6, right=2), num_devices=4, batch_size=32, num_micro_batches=8)
    flops = [stage.figures.flops.at(1) for stage in plan.stages]
    assert max(flops) <= 1.35 * sum(flops) / 4


def test_one_device_holds_the_whole_model() -> None:
    plan = balanced(graphs.gpt(), num_devices=1, batch_size=8)
    assert [(stage.name, stage.modules) for stage in plan.stages] == [("model", ("", "@step"))]


def test_tied_weights_may_be_in_two_stages() -> None:
    plan = balanced(graphs.gpt(), num_devices=2, batch_size=8)
    assert "transformer.wte" in plan.stages[0].modules
    assert "lm_head" in plan.stages[1].modules


def test_deterministic(tmp_path: Path) -> None:
    plans = [balanced(graphs.encoder_decoder(), num_devices=3, batch_size=32) for _ in range(2)]
    assert plans[0] == plans[1]
    plans[0].save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plans[0]


def test_faster_devices_may_change_the_plan_but_not_its_validity() -> None:
    plan = balanced(graphs.unet(), num_devices=3, batch_size=32, device=H100)
    assert len(plan.stages) == 3


def test_the_default_number_of_micro_batches_is_twice_the_depth() -> None:
    plan = balanced(graphs.feature_towers(), num_devices=4, batch_size=32)
    assert plan.depth == 2
    assert len(plan.intervals(plan.step_stage)) == 4


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "shared_block"])
def test_the_estimate_of_the_search_agrees_with_the_simulator(name: str) -> None:
    graph = FAMILIES[name]()
    units = find_units(graph, num_pieces=4, num_samples=4, device=CPU)
    found = search(Problem(units=units, num_stages=3, num_micro_batches=8, link=LOOPBACK))
    stages = [
        {
            "modules": [
                module
                for unit, home in zip(units.units, found.stage, strict=True)
                if home == stage
                for module in unit.modules
            ]
        }
        for stage in range(3)
    ]
    plan = manual(graph, stages, batch_size=32, micro_batch_size=4)
    timeline = simulate(compile_program(plan), estimate(graph, plan))
    assert found.score() == pytest.approx(timeline.makespan, rel=0.1)


def test_branches_side_by_side_are_faster_than_the_same_stages_in_a_chain() -> None:
    graph = graphs.two_towers(num_blocks=8)
    plan = balanced(graph, num_devices=4, batch_size=64, num_micro_batches=16)
    costs = estimate(graph, plan)
    timeline, chain = (simulate(compile_program(each), costs) for each in (plan, plan.chained()))
    assert timeline.makespan < chain.makespan


def test_fewer_pieces_than_devices() -> None:
    with pytest.raises(PlanError, match=r"at most 3 stages, but a pipeline has 4 devices .*num_pipelines"):
        balanced(graphs.chain(3), num_devices=4, batch_size=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_micro_batches": 9}, r"More micro-batches than samples: strategy.num_micro_batches=9.* 8 samples"),
        ({"num_micro_batches": 0}, r"num_micro_batches=0; it must be"),
        ({"num_micro_batches": 5}, r"do not give 5 micro-batches .*num_micro_batches=4"),
        ({"micro_batch_size": 9}, r"strategy.micro_batch_size=9, but a mini-batch has 8 samples"),
        ({"micro_batch_size": 2, "num_micro_batches": 4}, r"Both strategy.num_micro_batches=4"),
    ],
)
def test_micro_batches_that_do_not_fit(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        balanced(graphs.chain(), num_devices=2, batch_size=8, **settings)


def test_no_devices() -> None:
    with pytest.raises(ConfigError, match="at least 1 device and 1 sample, got 0 devices"):
        balanced(graphs.chain(), num_devices=0, batch_size=8)


def balanced_again(graph: OperatorGraph, request: Request) -> Plan:
    return partition("balanced", graph, request)


def test_partitioners_by_name() -> None:
    request = Request(num_devices=2, batch_size=8, device=CPU)
    assert partition("balanced", graphs.chain(), request) == balanced(graphs.chain(), num_devices=2, batch_size=8)
    assert "balanced" in partitioner_names()
    with pytest.raises(ConfigError, match=r"strategy.partitioner='best' does not exist. Choose one of: balanced"):
        partition("best", graphs.chain(), request)
    with pytest.raises(ConfigError, match="'balanced' is registered already"):
        register("balanced")(balanced_again)
