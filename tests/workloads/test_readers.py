"""Graphs from files of this library, and from tiny profiles of the published forms."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planners.piper_profile import read_profile
from lightning_gpp.costs.measured import OperatorSeconds
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import STEP
from lightning_gpp.planning.assignment.modules import DATA
from lightning_gpp.planning.graph_file import read_graph
from tests.planning import graphs

PIPER = """{"maxMemoryPerDevice": 8e10, "maxDevices": 4, "bandwidth": 25e9, "mbsInBatch": 8,
"nodes": [
 {"id": 7, "name": "head.out", "TMPCs": {"1": [
   {"id": "activation recomp", "timePerSample": 8, "parameterSize": 400, "memoryUsageA": 1, "memoryUsageB": 900},
   {"id": "vanilla", "timePerSample": 6, "parameterSize": 400, "memoryUsageA": 50, "memoryUsageB": 800}]}},
 {"id": 0, "name": "tokens", "TMPCs": {"1": [
   {"id": "vanilla", "timePerSample": 0, "parameterSize": 0, "memoryUsageA": 0, "memoryUsageB": 0}]}},
 {"id": 1, "TMPCs": {"1": [
   {"id": "vanilla", "timePerSample": 3, "parameterSize": 0, "memoryUsageA": 30, "memoryUsageB": 0}]}},
 {"id": 2, "name": "head_out", "TMPCs": {"1": [
   {"id": "vanilla", "timePerSample": 3, "parameterSize": 80, "memoryUsageA": 20, "memoryUsageB": 160}]}}],
"edges": [{"sourceId": 0, "destId": 1, "communicationCost": 16}, {"sourceId": 1, "destId": 7, "communicationCost": 30},
 {"sourceId": 2, "destId": 7, "communicationCost": 20}]}"""


def write(folder: Path, content: Any) -> Path:
    path = folder / "graph.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_own_graphs_come_back_as_they_were(tmp_path: Path) -> None:
    graph = graphs.two_towers()
    again = read_graph(write(tmp_path, graph.to_json()))
    assert json.loads(again.to_json()) == json.loads(graph.to_json())


def test_piper(tmp_path: Path) -> None:
    graph, costs = read_profile(write(tmp_path, PIPER))
    assert [operator.name for operator in graph] == [
        "tokens",
        "node1",
        "data.head_out_2",
        "head_out_2",
        "head_out",
        "step",
    ]
    assert [operator.module for operator in graph] == [DATA, "node1", DATA, "head_out_2", "head_out", STEP]
    assert [o.outputs[0].bytes(2) for o in graph if o.outputs] == [32, 60, 0, 40, 0]
    assert sorted(graph.nx.edges) == [
        ("data.head_out_2", "head_out_2"),
        ("head_out", "step"),
        ("head_out_2", "head_out"),
        ("node1", "head_out"),
        ("tokens", "node1"),
    ]
    assert graph["head_out"].saved_bytes == Affine(50)
    assert graph.parameter_bytes == {"head_out_2.weight": 80, "head_out.weight": 400}
    assert costs is not None
    assert list(costs.operators) == [operator.name for operator in graph]
    assert costs.operators["head_out"].forward.at(3) == pytest.approx(6e-3)
    assert costs.operators["head_out"].input_gradient.at(1) == pytest.approx(2e-3)
    assert costs.operators["head_out"].weight_gradient.at(1) == pytest.approx(2e-3)
    assert costs.operators["node1"].backward.at(1) == costs.operators["node1"].input_gradient.at(1)
    assert costs.operators["head_out_2"].weight_gradient == costs.operators["head_out_2"].backward
    assert costs.operators["tokens"] == OperatorSeconds()


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


NATIVE = graphs.chain(2).to_json()

REFUSED = {
    "not_json": ("{", r"graph\.json: is not JSON: Expecting property name"),
    "key": (changed(NATIVE, '"saved_bytes"', '"kept"'), r"operators\[0\]\.kept is not a key\..* saved_bytes"),
    "edge": (changed(NATIVE, '"name": "op1"', '"name": "op9"'), r"operator 'op1' is not among operators\. Add"),
    "output": (changed(NATIVE, "[\n    0\n   ]", "[4]"), r"reads outputs \[4\] of 'op0', which has 1"),
    "nan": (changed(NATIVE, '"per_sample": 0.0', '"per_sample": NaN'), r"per_sample is nan; it must be a finite"),
    "negative": (changed(NATIVE, '"per_sample": 0', '"per_sample": -1'), r"operator 'op0' has a per_sample below 0"),
    "size": (re.sub('(weight": )[0-9]+', r"\1-4", NATIVE), r"weight is -4.*; it must be >= 0"),
    "twice": (changed(NATIVE, '"name": "op1"', '"name": "op0"'), r"is 'op0'; it must be a name that no other"),
    "deep": ("[" * 200_000, r"is not JSON"),
    "parameter": (changed(NATIVE, '"blocks.1.weight": ', '"other": '), r"parameters \['blocks.1.weight'\], which"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_told(case: str, tmp_path: Path) -> None:
    content, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        read_graph(write(tmp_path, content))


def test_own_graphs_must_not_be_cyclic_and_must_be_in_order(tmp_path: Path) -> None:
    graph = graphs.chain(2)
    content = json.loads(graph.to_json())
    content["edges"].append(["op2", "op1", [0]])
    with pytest.raises(PlanError, match=r"'op1' comes before 'op2', which it reads.*cycle"):
        read_graph(write(tmp_path, content))
    content = json.loads(graph.to_json())
    content["operators"].reverse()
    with pytest.raises(PlanError, match=r"'op3' comes before 'op2', which it reads\. List operators"):
        read_graph(write(tmp_path, content))
