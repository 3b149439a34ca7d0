"""Sizes of the workloads, against what the papers state and against sums done by hand."""

import networkx as nx
import pytest

from benchmarks.workloads import WORKLOADS, build, graph
from lightning_gpp.plan import STEP
from lightning_gpp.planning.assignment.modules import module_tree

MILLION, GIGA = 1e6, 1e9


def num_parameters(name: str, prefix: str = "") -> int:
    return sum(size for path, size in graph(name).parameter_sizes.items() if path.startswith(prefix))


def flops(name: str, prefix: str = "") -> float:
    """Forward FLOPs of one sample."""
    return sum(operator.flops.at(1) for operator in graph(name) if operator.module.startswith(prefix))


@pytest.mark.parametrize("name", WORKLOADS)
def test_names_and_batches_agree_with_the_registry(name: str) -> None:
    workload = WORKLOADS[name]
    assert workload.name == name
    assert workload.source
    _, batch = build(name)
    tensors = [leaf for entry in batch for leaf in (entry if isinstance(entry, list) else [entry])]
    assert {tensor.shape[0] for tensor in tensors} == {workload.batch_size}
    assert all(tensor.is_meta for tensor in tensors)


@pytest.mark.parametrize("name", ["mmt2", "candle_uno_2", "unet"])
def test_the_graph_holds_every_parameter_of_the_model_and_ends_in_the_step(name: str) -> None:
    module, _ = build(name)
    assert all(parameter.is_meta for parameter in module.parameters())
    captured = graph(name)
    read = {parameter for operator in captured for parameter in operator.parameters}
    assert read == {path for path, _ in module.named_parameters()}
    assert nx.is_directed_acyclic_graph(captured.nx)
    assert next(operator.module for operator in reversed(list(captured))) == STEP
    assert graph(name) is captured


def test_mmt() -> None:
    assert num_parameters("mmt", "branches.0.0.") == pytest.approx(12.58 * MILLION, rel=1e-3)
    assert num_parameters("mmt") == pytest.approx(403 * MILLION, rel=2e-3)
    assert num_parameters("mmt2", "branches.1.") == num_parameters("mmt", "branches.3.")
    products = 2 * 256 * 4 * 8 * 12 * 1024**2
    attention = 4 * 256**2 * 1024 * 4 * 8
    assert flops("mmt") == pytest.approx(products + attention, rel=0.01)


def test_dlrm() -> None:
    assert num_parameters("dlrm", "towers.") == pytest.approx(470 * MILLION, rel=1e-3)
    assert num_parameters("dlrm", "tables.") == 448 * MILLION
    width = 7 * 4096 + 7 * 6400
    assert num_parameters("dlrm", "trunk.0.") == (width + 1) * 4096
    assert flops("dlrm") == pytest.approx(2 * (7 * 4 + 3) * 4096**2 + 2 * width * 4096, rel=0.01)


@pytest.mark.parametrize("num_branches", [2, 7])
def test_candle_uno(num_branches: int) -> None:
    name = "candle_uno" if num_branches == 7 else f"candle_uno_{num_branches}"
    assert num_parameters(name, "towers.") == num_branches * 4 * 4097 * 4096
    assert num_parameters(name, "trunk.") == (num_branches * 4096 + 1 + 3 * 4097) * 4096
    assert len(module_tree(graph(name)).children["towers"].children) == num_branches


def test_unet() -> None:
    captured = graph("unet")
    assert num_parameters("unet") == pytest.approx(31.03 * MILLION, rel=1e-3)
    assert flops("unet", "down.0.0") == pytest.approx(2 * 9 * 64 * 512**2, rel=0.01)
    joins = [operator for operator in captured if operator.target == "cat"]
    sources = [{captured[name].module.split(".")[0] for name in captured.nx.predecessors(join.name)} for join in joins]
    assert sources == [{"down", "widen"}] * 4
