"""`strategy.trace=true` tells what was simulated and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.strategy import harness


def train(rank: int, folder: str) -> None:
    trainer = harness.trainer(harness.strategy(trace=True), devices=4, max_epochs=2, default_root_dir=folder)
    trainer.fit(harness.make_module(), harness.loader(samples=48))
    trainer.validate(trainer.lightning_module, harness.loader(samples=16), verbose=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two pipelines of two devices leave, after 3 mini-batches of 8 samples in each of 2 epochs."""
    path = tmp_path_factory.mktemp("trace")
    harness.run(4, train, str(path))
    return path


def test_all_ranks_are_put_together(folder: Path) -> None:
    table, simulated, measured = (folder / "gpp-trace-compared.txt").read_text().split("\n\n")
    heading, _, _, *rows = table.splitlines()
    assert heading == "Simulated and measured, mean of 10 mini-batches of 8 samples:"  # all but the first of 6, twice
    cells = {tuple(cell.strip() for cell in row.strip("|").split("|"))[:2]: row for row in rows}
    stages = {
        "0 left": ("forward", "backward"),
        "1 right+head": ("data", "forward", "backward"),
        "all": ("step", "idle"),
    }
    assert list(cells) == [(stage, kind) for stage, kinds in stages.items() for kind in kinds]
    assert all(("device 1 |" in picture) and "B" in picture for picture in (simulated, measured))


def test_the_step_spans_all_devices(folder: Path) -> None:
    """The step is at least what the busiest of a pipeline's devices took, as its own trace has it."""
    table = (folder / "gpp-trace-compared.txt").read_text()
    row = next(line for line in table.splitlines() if "| step" in line)
    amount, unit = row.split("|")[4].split()
    step = float(amount) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]
    busy = [[0.0] * 5 for _ in range(4)]
    for event in spans_of(folder):
        if event["args"]["mini_batch"] > 0:  # the validation after the training leaves the trace as it is
            busy[event["pid"]][event["args"]["mini_batch"] - 1] += event["dur"]
    means = [sum(max(a, b) for a, b in zip(*busy[p : p + 2], strict=True)) / 5 for p in (0, 2)]
    assert step >= 0.99 * sum(means) / 2


def events_of(folder: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads((folder / "gpp-trace.json").read_text())["traceEvents"]
    return events


def spans_of(folder: Path) -> list[dict[str, Any]]:
    """The actions of all ranks; a process of the trace is a rank."""
    return [event for event in events_of(folder) if event["ph"] == "X"]


def test_one_trace_has_all_ranks(folder: Path) -> None:
    """Each rank is a process."""
    events = events_of(folder)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"pipeline {rank // 2}, device {rank % 2}" for rank in range(4)}
