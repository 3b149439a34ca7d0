"""A pytest plugin for Lightning's own tests: trainers without a strategy get one of this library.

Every test leaves a line in the file that `GPP_SUITE_RESULTS` names: its outcome, and whether it made such a trainer.
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
_LONGEST = 2000
"""Characters of an error that are kept."""

_chosen: list[str] = []
"""Strategies of the running test's trainers that Lightning chose."""


def _choose(plain: Any) -> Any:
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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _chosen.clear()
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
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps(line) + "\n")
