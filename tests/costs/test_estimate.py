import pytest

from lightning_gpp.costs.roofline import LOOPBACK, Device
from lightning_gpp.planning import manual
from lightning_gpp.planning.units import find_units
from lightning_gpp.simulation import estimate
from tests.planning import graphs

DEVICE = Device(name="test", flops_per_second=1e6, bytes_per_second=1e6, seconds_per_operator=0.25)


def test_stage_costs_are_those_of_the_units_they_consist_of() -> None:
    graph = graphs.two_towers()
    plan = manual(graph, {"image_tower": 0, "text_tower": 1, "head": 2}, batch_size=32, micro_batch_size=8)
    units = find_units(graph, num_pieces=2, num_samples=8, device=DEVICE).units
    costs = estimate(graph, plan, device=DEVICE, link=LOOPBACK)
    for stage, unit in zip(costs.stages, units, strict=True):
        assert stage.forward.at(8) == pytest.approx(unit.forward)
        assert stage.backward.at(8) == pytest.approx(unit.backward)
        assert stage.activation_bytes == unit.activation_bytes
        assert stage.parameter_bytes == unit.parameter_bytes
    assert costs.default_link is LOOPBACK


def test_micro_batches_of_one_sample() -> None:
    graph = graphs.chain(2)
    plan = manual(graph, {"blocks.0": 0, "blocks.1": 1}, batch_size=4, micro_batch_size=1)
    costs = estimate(graph, plan, device=DEVICE)
    assert costs.stages[0].forward.at(1) == pytest.approx(0.25 + 1)
    assert costs.stages[0].forward.at(3) == pytest.approx(0.25 + 3)


def test_frozen_stages_have_no_backward() -> None:
    build = graphs.Builder()
    build.graph.parameter_bytes["frozen.weight"] = build.graph.parameter_sizes["frozen.weight"] = 10
    frozen = build.call("frozen", build.data(), parameters=["frozen.weight"], grad=False, flops=1e6)
    graph = build.step(build.linear("head", frozen))
    costs = estimate(graph, manual(graph, {"frozen": 0, "head": 1}, batch_size=4), device=DEVICE)
    assert costs.stages[0].backward.at(2) == 0
    assert costs.stages[1].backward.at(2) > 0
