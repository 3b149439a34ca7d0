import re
from typing import Any

import pytest

from lightning_gpp.errors import ConfigError, GPPError, PlanError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import count_pipelines, devices_per_pipeline, manual
from tests.planning import graphs

TOWERS = {"image_tower": 0, "text_tower": 1, "head": 2}


def stages_of(plan: Plan) -> list[tuple[str, tuple[str, ...], tuple[int, ...], int]]:
    return [(stage.name, stage.modules, stage.devices, stage.micro_batch_size) for stage in plan.stages]


def test_short_form() -> None:
    plan = manual(graphs.two_towers(), TOWERS, batch_size=32, num_micro_batches=8)
    assert stages_of(plan) == [
        ("image_tower", ("image_tower",), (2,), 4),
        ("text_tower", ("text_tower",), (1,), 4),
        ("head", ("head", "@step"), (0,), 4),
    ]
    assert {(edge.src, edge.dst) for edge in plan.edges} == {(-1, 0), (-1, 1), (0, 2), (1, 2)}


def test_list_forms_in_any_order() -> None:
    stages = [{"modules": ["head", "@step"]}, {"name": "text", "modules": "text_tower"}, {"modules": ["image_tower"]}]
    plan = manual(graphs.two_towers(), stages, batch_size=32)
    assert [stage.name for stage in plan.stages] == ["text", "image_tower", "head"]
    assert [stage.devices for stage in plan.stages] == [(2,), (1,), (0,)]
    assert len(plan.intervals(0)) == 2 * plan.depth
    assert manual(graphs.two_towers(), [{"modules": [""]}], batch_size=4).depth == 1


def test_submodules_may_be_taken_out_of_a_module() -> None:
    plan = manual(graphs.chain(4), [{"modules": ["blocks"]}, {"modules": ["blocks.3"]}], batch_size=8)
    assert plan.stages[1].modules == ("blocks.3", "@step")
    assert plan.stages[0].figures.num_parameters == 3 * plan.stages[1].figures.num_parameters


def test_parameters_of_a_divided_module_itself_need_no_stage() -> None:
    build = graphs.Builder()
    x = build.linear("net", build.data(), parameter="net.positions")
    graph = build.step(build.linear("net.b", build.linear("net.a", x)))
    plan = manual(graph, {"net.a": 0, "net.b": 1}, batch_size=8)
    assert [stage.figures.num_parameters for stage in plan.stages] == [2 * 64 * 64, 64 * 64]


@pytest.mark.parametrize(
    ("placement", "error", "message"),
    [
        ({"image_towr": 0, "text_tower": 0, "head": 1}, PlanError, r"strategy.stages names .*'image_towr'.*'image_tow"),
        ({"image_tower": 0, "head": 1}, PlanError, r"leaves parameters without a stage: those of text_tower.*mlp"),
        (
            [{"modules": ["head"]}, {"modules": ["head", "@step"]}],
            PlanError,
            r"'head' is listed twice, by stages 0 and 1 .strategy.st",
        ),
        ({"image_tower": 0, "text_tower": 2, "head": 3}, ConfigError, r"the stages \[0, 2, 3\].* Use \[0, 1, 2\]"),
        ({"image_tower": 0, "head": "cpu:1"}, ConfigError, r"has 'head': 'cpu:1'; it must map .*=.encoder: 0, decoder"),
        ([["image_tower"], ["head"]], ConfigError, r"\[0\] is \['image_tower'\]; it must be a mapping"),
        ({}, ConfigError, "strategy.stages is empty"),
        ([{"module": ["head"]}], ConfigError, r"strategy.stages\[0\].module is not a key. Did you mean modules\?"),
        ([{"modules": ["head"], "device": [0]}], ConfigError, r"\.device is not a key\. .*A stage has `modules`"),
        ([{"modules": [""]}, {"modules": ["head"], "micro_batch_size": 64}], ConfigError, r"micro_batch_size=64, but"),
        ([{"modules": [""], "devices": [0]}, {"modules": ["head"], "devices": [1]}], PlanError, r"must be on device 0"),
        ([{"modules": [""], "devices": [0]}, {"modules": ["head"]}], ConfigError, r"devices to some stages only"),
        (
            {"image_tower": 0, "text_tower": 1, "text_tower.blocks": 2, "head": 3},
            PlanError,
            r"modules \['text_tower'\], computes nothing",
        ),
    ],
)
def test_bad_placements(placement: Any, error: type[GPPError], message: str) -> None:
    with pytest.raises(error, match=message):
        manual(graphs.two_towers(), placement, batch_size=32)


def test_cyclic_stages_are_named() -> None:
    placement = {f"blocks.{index}": index % 2 for index in range(4)}
    with pytest.raises(PlanError, match=r"cycle: blocks.* -> blocks.* -> blocks.*strategy.stages"):
        manual(graphs.chain(4), placement, batch_size=8)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_devices_that_do_not_suffice(num_devices: int) -> None:
    message = rf"needs 3 devices, the job has {num_devices} \(trainer.devices.*Set trainer.devices"
    with pytest.raises(PlanError, match=message):
        count_pipelines(manual(graphs.two_towers(), TOWERS, batch_size=32), num_devices)


def test_pipelines() -> None:
    plan = manual(graphs.two_towers(), TOWERS, batch_size=32)
    assert count_pipelines(plan, 6) == 2
    assert devices_per_pipeline(8, None) == 8
    assert devices_per_pipeline(8, 2) == 4
    with pytest.raises(ConfigError, match=re.escape("num_pipelines=3 does not divide the 8 devices") + ".*1, 2, 4, 8"):
        devices_per_pipeline(8, 3)
