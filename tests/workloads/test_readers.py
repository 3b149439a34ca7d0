"""Graphs from files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_gpp.errors import PlanError
from lightning_gpp.planning.graph_file import read_graph
from tests.planning import graphs


def write(folder: Path, content: Any) -> Path:
    path = folder / "graph.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_own_graphs_come_back_as_they_were(tmp_path: Path) -> None:
    graph = graphs.two_towers()
    again = read_graph(write(tmp_path, graph.to_json()))
    assert json.loads(again.to_json()) == json.loads(graph.to_json())


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
