"""The part of a member of a device, and a plan for a layer that is too large for one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp import Affine, Cluster, Device, Link, OperatorGraph, PlanError, Request, best_plan
from lightning_gpp.costs.model import Roofline
from lightning_gpp.costs.tensor_parallel import num_sums
from lightning_gpp.graph import Operator, TensorSpec
from lightning_gpp.training.measured.machine import Machine, of_groups

LAYERS = ("first", "second")
VALUE = TensorSpec(shape=(Affine(1, 0), Affine(0, 250)), dtype="float32", requires_grad=True)


def graph(parameter_bytes: int) -> OperatorGraph:
    """Two layers of a gigaflop per sample and their step."""
    found = OperatorGraph()
    found.add(Operator(name="input0", target="input", module="@source", outputs=(VALUE,)))
    before = "input0"
    for name in LAYERS:
        found.parameter_bytes[f"{name}.weight"] = found.parameter_sizes[f"{name}.weight"] = parameter_bytes
        weights, flops = (f"{name}.weight",), Affine(1e9, 0)
        found.add(
            Operator(
                name=name,
                target="linear",
                module=name,
                parameters=weights,
                outputs=(VALUE,),
                flops=flops,
                saved_bytes=Affine(4000, 0),
            )
        )
        found.connect(before, name, 0)
        before = name
    found.add(Operator(name="step", target="step", module="@step"))
    found.connect(before, "step", 0)
    return found


def machine(count: int, memory_bytes: float) -> Machine:
    device = Device(name="small", memory_bytes=memory_bytes, peak_flops={"float32": 1e12}, peak_bytes_per_second=1e15)
    return Machine(cluster=Cluster.uniform(device, count, Link(latency=1e-3, bytes_per_second=1e9)))


def test_members_divide_parameters_and_work_and_add_up_results() -> None:
    whole, alone = replace(graph(1000), uncalled=frozenset({"layers"})), machine(4, 1e9)
    groups = of_groups(alone, {"first.weight": 0}, 2, whole)
    part = groups.part(whole)
    assert groups.cluster.num_devices == 2
    assert part.parameter_bytes == {"first.weight": 500, "second.weight": 1000}
    assert part["first"].flops.at(1) == 0.5e9
    assert part["second"].flops.at(1) == 1e9
    assert list(part.nx.edges) == list(whole.nx.edges)
    assert part.uncalled == whole.uncalled
    device, costs = groups.cluster.kinds[0], groups.costs
    assert costs is not None
    without, added = Roofline(part).seconds(part["first"], 4, device), 2 * (1e-3 + 4 * 1000 / 2 / 1e9)
    found = costs.seconds(part["first"], 4, device)
    assert found.forward == pytest.approx(without.forward + added)
    assert found.backward == pytest.approx(without.backward + added)
    assert costs.seconds(part["second"], 4, device) == Roofline(part).seconds(part["second"], 4, device)


def test_each_matrix_that_is_cut_along_its_input_is_a_sum() -> None:
    """A layer with two of them, such as attention and feed-forward in a block, adds up twice each way."""
    divided = {"first.weight": 1, "second.weight": 1}
    both = Operator(name="both", target="call", parameters=tuple(divided), outputs=(VALUE,))
    whole = replace(graph(1000), divided=divided)
    assert num_sums(whole, both) == 2
    assert num_sums(whole, whole["first"]) == 1
    assert num_sums(replace(whole, divided=dict.fromkeys(divided, 0)), both) == 1


def test_layer_that_is_too_large_for_one_process_gets_a_plan() -> None:
    whole, alone = graph(10**6), machine(4, 3e6)  # a layer takes 4 MB with its gradient and Adam's state
    with pytest.raises(PlanError):
        best_plan("auto", whole, Request(cluster=alone.cluster, batch_size=8, footprint=alone.footprint))
    groups = of_groups(alone, {f"{name}.weight": 0 for name in LAYERS}, 2, whole)
    request = Request(cluster=groups.cluster, batch_size=8, footprint=groups.footprint, costs=groups.costs)
    found = best_plan("auto", groups.part(whole), request)
    assert found.plan.num_devices == 2
    assert sorted(module for stage in found.plan.stages for module in stage.modules)[-2:] == sorted(LAYERS)
