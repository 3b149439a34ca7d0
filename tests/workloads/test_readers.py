"""Graphs from files of this library, and from tiny profiles of the published forms."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planners.piper_profile import read_profile
from lightning_gpp.cluster import DEVICES
from lightning_gpp.costs.measured import OperatorSeconds
from lightning_gpp.costs.model import CostModel
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import STEP, Stage
from lightning_gpp.planning.assignment.assign import make_plan
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


def test_times_can_be_in_seconds(tmp_path: Path) -> None:
    _, costs = read_profile(write(tmp_path, PIPER), time_unit=1.0)
    assert costs is not None
    assert costs.operators["head_out"].forward.at(1) == pytest.approx(2.0)


def test_costs_are_a_cost_model(tmp_path: Path) -> None:
    graph, costs = read_profile(write(tmp_path, PIPER))
    model: CostModel = costs
    assert model.seconds(graph["head_out"], 10, DEVICES["a100_sxm_80gb"]) == pytest.approx((20e-3, 20e-3, 20e-3))
    with pytest.raises(PlanError, match=r"graph\.json: operator 'op1' is not listed\. Use the costs"):
        model.seconds(graphs.chain(1)["op1"], 1, DEVICES["a100_sxm_80gb"])


def test_what_is_read_can_be_planned(tmp_path: Path) -> None:
    graph, _ = read_profile(write(tmp_path, PIPER))
    drafts = [
        Stage(name="a", modules=("node1",), devices=(0,), micro_batch_size=1),
        Stage(name="b", modules=("head_out_2",), devices=(1,), micro_batch_size=1),
        Stage(name="c", modules=("head_out", STEP), devices=(2,), micro_batch_size=1),
    ]
    plan = make_plan(graph, drafts, batch_size=4)
    assert [(edge.src, edge.dst, edge.bytes.at(1)) for edge in plan.edges if edge.src >= 0] == [(0, 2, 30), (1, 2, 20)]
    assert [stage.figures.parameter_bytes for stage in plan.stages] == [0, 80, 400]


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


NATIVE = graphs.chain(2).to_json()

REFUSED = {
    "not_json": ("{", r"graph\.json: is not JSON: Expecting property name"),
    "missing": (
        changed(PIPER, '"memoryUsageA": 30, ', ""),
        r"nodes\[2\]\.TMPCs\.1\[0\]\.memoryUsageA is missing\.",
    ),
    "negative": (changed(PIPER, '"timePerSample": 6', '"timePerSample": -6'), r"timePerSample is -6; it must be >= 0"),
    "no_degree": (PIPER.replace('"1": [', '"2": ['), r"nodes\[0\]\.TMPCs\.1 is missing\."),
    "no_way": (
        '{"mbsInBatch": 1, "nodes": [{"id": 0, "TMPCs": {"1": []}}], "edges": []}',
        r"TMPCs\.1 is \[\]; it must be a list of at least 1",
    ),
    "no_node": (changed(PIPER, '"destId": 1', '"destId": 5'), r"edges\[0\]\.destId is 5; it must be the id of a node"),
    "cycle": (changed(PIPER, '"sourceId": 2', '"sourceId": 7'), r"edges form a cycle: 7 -> 7\. .* remove one"),
    "id": (changed(PIPER, '"id": 2,', '"id": "x",'), r"nodes\[3\]\.id is 'x'; it must be a whole number"),
    "name": (changed(PIPER, '"head_out"', "5"), r"nodes\[3\]\.name is 5; it must be text"),
    "native_key": (changed(NATIVE, '"saved_bytes"', '"kept"'), r"operators\[0\]\.kept is not a key\..* saved_bytes"),
    "native_type": (
        '{"operators": 3, "edges": [], "parameter_bytes": {}}',
        r"graph\.json: operators is 3; it must be a",
    ),
    "native_value": (
        changed(NATIVE, '"float32"', '"float32", "shape": 3'),
        r"\[0\]\.shape is 3; it must be a list",
    ),
    "native_edge": (changed(NATIVE, '"name": "op1"', '"name": "op9"'), r"operator 'op1' is not among operators\. Add"),
    "native_output": (changed(NATIVE, "[\n    0\n   ]", "[4]"), r"reads outputs \[4\] of 'op0', which has 1"),
    "native_nan": (
        changed(NATIVE, '"per_sample": 0.0', '"per_sample": NaN'),
        r"per_sample is nan; it must be a finite number",
    ),
    "native_negative": (
        changed(NATIVE, '"per_sample": 0', '"per_sample": -1'),
        r"per_sample is -1.*; it must not be",
    ),
    "native_size": (re.sub('(weight": )[0-9]+', r"\1-4", NATIVE), r"weight is -4.*; it must be >= 0"),
    "native_twice": (
        changed(NATIVE, '"name": "op1"', '"name": "op0"'),
        r"is 'op0'; it must be a name that no other operator has",
    ),
    "native_empty": (
        '{"operators": [], "edges": [], "parameter_bytes": {}, "parameter_sizes": {}, "buffer_bytes": {}}',
        r"operators is empty\. Write the graph again",
    ),
    "native_table": ('{"operators": [], "parameter_bytes": 3}', r"parameter_bytes is 3; it must be a mapping"),
    "deep": ("[" * 200_000, r"is not JSON"),
    "native_parameter": (changed(NATIVE, '"blocks.1.weight": ', '"other": '), r"parameter 'blocks.1.weight', which"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_told(case: str, tmp_path: Path) -> None:
    content, message = REFUSED[case]
    read = read_graph if case.startswith("native") or case in ("not_json", "deep") else read_profile
    with pytest.raises(PlanError, match=message):
        read(write(tmp_path, content))


def test_own_graphs_must_not_be_cyclic_and_must_be_in_order(tmp_path: Path) -> None:
    graph = graphs.chain(2)
    content = json.loads(graph.to_json())
    content["edges"].append(["op2", "op1", [0]])
    with pytest.raises(PlanError, match=r"edges form a cycle: op1 -> op2 -> op1"):
        read_graph(write(tmp_path, content))
    content = json.loads(graph.to_json())
    content["operators"].reverse()
    with pytest.raises(PlanError, match=r"'op3' comes before 'op2', which it reads\. List operators"):
        read_graph(write(tmp_path, content))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json: cannot be read: No such file"):
        read_graph(tmp_path / "none.json")
