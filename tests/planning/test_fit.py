from dataclasses import replace

import pytest

from lightning_gpp.cluster import preset_cluster
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Request, best_plan, check_model, manual
from tests.planning import graphs


def planned(graph: OperatorGraph, num_devices: int) -> Plan:
    request = Request(
        cluster=preset_cluster("cpu_host", num_devices=num_devices), batch_size=12, model="abc", max_replicas=1
    )
    return best_plan("graphpipe", graph, request).plan


def test_the_same_model_fits() -> None:
    for graph in (graphs.two_towers(), graphs.gpt(), graphs.unet()):
        plan = planned(graph, 3)
        check_model(plan, graph, "abc")
        check_model(plan.chained(), graph, "abc")
        check_model(replace(plan, model=""), graph, "other")


def test_another_model_is_refused_with_its_modules() -> None:
    plan = manual(graphs.two_towers(), {"image_tower": 0, "text_tower": 1, "head": 2}, batch_size=12)
    with pytest.raises(
        PlanError, match=r"made for another model.*does not call: image_tower, .*does not place: blocks"
    ):
        check_model(plan, graphs.chain())


def test_a_module_that_a_plan_by_hand_leaves_out_is_named() -> None:
    plan = manual(graphs.two_towers(), {"image_tower": 0, "text_tower": 1, "head": 2}, batch_size=12)
    stages = (*plan.stages[:-1], replace(plan.stages[-1], modules=("@step",)))
    with pytest.raises(PlanError, match=r"strategy.plan leaves parameters without a stage: those of head"):
        check_model(replace(plan, stages=stages), graphs.two_towers())


def test_another_fingerprint_is_refused() -> None:
    plan = planned(graphs.chain(), 2)
    with pytest.raises(PlanError, match=r"fingerprint is 'abc' and the model's 'xyz'"):
        check_model(plan, graphs.chain(), "xyz")
