"""A pytest plugin for Lightning's own tests: trainers without a strategy get one of this library.

Every test leaves lines in the file that `GPP_SUITE_RESULTS` names: that it began, its outcome, and whether it made such
a trainer. Tests that have lines are left out, so that a run can be continued, also after a test that ended the process.
With `GPP_SUITE_INJECT=1` these trainers get a `GPPStrategy` of one process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_gpp import GPPStrategy

INJECT, RESULTS = "GPP_SUITE_INJECT", "GPP_SUITE_RESULTS"
ENDED = "the process ended during this test"
_LONGEST = 2000
"""Characters of an error that are kept."""

_chosen: list[str] = []
"""Strategies of the running test's trainers that Lightning chose."""


def _choose(plain: Any) -> Any:
    """Lightning's choice of a strategy where the user leaves it open: on one CPU, ours."""

    def choose(connector: Any) -> Any:
        strategy = plain(connector)
        if type(strategy) is not SingleDeviceStrategy or strategy.root_device.type != "cpu":
            return strategy
        _chosen.append(type(strategy).__name__)
        return GPPStrategy(self_check=False) if os.environ.get(INJECT) == "1" else strategy

    return choose


def pytest_configure(config: pytest.Config) -> None:
    if "LOCAL_RANK" in os.environ:  # a test with several devices has started all tests again
        pytest.exit("This process is a rank that a test has started.", returncode=1)
    _AcceleratorConnector._choose_strategy = _choose(_AcceleratorConnector._choose_strategy)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {line["test"] for line in lines_of(Path(os.environ[RESULTS]))}
    left_out = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _chosen.clear()
    _write({"test": item.nodeid, "outcome": "failed", "chosen": True, "seconds": 0.0, "error": ENDED})
    yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "chosen": bool(_chosen),
        "seconds": round(report.duration, 2),
        "error": "" if report.outcome == "passed" else report.longreprtext[-_LONGEST:],
    }
    _write(line)


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps(line) + "\n")
