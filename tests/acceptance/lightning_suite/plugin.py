"""A pytest plugin for Lightning's own tests: trainers without a strategy get one of this library.

Every test leaves lines in the file that `GPP_SUITE_RESULTS` names: that it began, its outcome, and whether it made such
a trainer. Tests that have lines are left out, so that a run can be continued, also after a test that ended the process.
With `GPP_SUITE_INJECT=1` these trainers get a `GPPStrategy` of one process. With `GPP_SUITE_PROCESSES=2` the trainers
are those of two CPU processes by multiprocessing (ddp_spawn, ddp_fork), and only tests that name these run.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_gpp import GPPStrategy
from lightning_gpp.strategy import processes
from tests.acceptance.lightning_suite.forking import ForkingLauncher

INJECT, RESULTS, PROCESSES = "GPP_SUITE_INJECT", "GPP_SUITE_RESULTS", "GPP_SUITE_PROCESSES"
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
        return _in_its_place(strategy)

    return choose


def _init_strategy(plain: Any) -> Any:
    """Lightning's making of the strategy: for two CPUs and multiprocessing, ours."""

    def init(connector: Any) -> None:
        plain(connector)
        strategy, devices = connector.strategy, connector._parallel_devices
        method = getattr(strategy, "_start_method", None)
        on_two = len(devices) == 2 and all(device.type == "cpu" for device in devices)
        if isinstance(strategy, DDPStrategy) and on_two and method in ("spawn", "fork"):
            connector.strategy = _in_its_place(strategy)

    return init


def _in_its_place(strategy: Any) -> Any:
    _chosen.append(type(strategy).__name__)
    return GPPStrategy(self_check=False) if os.environ.get(INJECT) == "1" else strategy


def _fork(strategy: Any) -> None:
    if strategy.num_processes > 1:
        strategy._launcher = ForkingLauncher(strategy, start_method="fork")


def _of_two() -> bool:
    return os.environ.get(PROCESSES) == "2"


def _names_two(item: Any) -> bool:
    """True if the test's source names data parallelism by multiprocessing."""
    return any(name in inspect.getsource(item.function) for name in ("ddp_spawn", "ddp_fork", "ddp_notebook"))


def pytest_configure(config: pytest.Config) -> None:
    if "LOCAL_RANK" in os.environ:  # a test with several devices has started all tests again
        pytest.exit("This process is a rank that a test has started.", returncode=1)
    if _of_two():
        _AcceleratorConnector._init_strategy = _init_strategy(_AcceleratorConnector._init_strategy)
        processes.JobProcesses._configure_launcher = _fork  # type: ignore[method-assign]
    else:
        _AcceleratorConnector._choose_strategy = _choose(_AcceleratorConnector._choose_strategy)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {line["test"] for line in lines_of(Path(os.environ[RESULTS]))}
    left_out = [item for item in items if item.nodeid in known or (_of_two() and not _names_two(item))]
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
