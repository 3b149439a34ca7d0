"""Composes configurations, and runs the commands as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_gpp.cli import schema
from lightning_gpp.cli.explain import config_folder
from lightning_gpp.cli.task import predict, task_of
from lightning_gpp.plan import Plan
from lightning_gpp.simulation import Timeline

ROOT = Path(__file__).parents[2]


def composed(*overrides: str, name: str = "train") -> DictConfig:
    schema.register()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def command(
    name: str, *arguments: str, cwd: Path, timeout: float = 55, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `gpp-<name>` in `cwd`; the result has the return code, what was printed, and the errors."""
    with subprocess.Popen(
        [sys.executable, "-m", f"lightning_gpp.cli.{name}", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", **os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


FORKS = """
import importlib, json, os, sys
import gpp_examples.two_tower, lightning_gpp.cli.job, lightning_gpp.cli.planning  # take seconds: loaded once
results = []
for name, *arguments in json.load(sys.stdin):
    process = os.fork()
    if not process:
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = [f"gpp-{name}", *arguments]
        importlib.import_module(f"lightning_gpp.cli.{name}").main()
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    results.append([code, open("out").read(), open("err").read()])
print(json.dumps(results))
"""


def commands(lines: Sequence[Sequence[str]], *, cwd: Path, timeout: float = 55) -> list[tuple[int, str, str]]:
    """Run commands one after the other, each in a process of its own: return codes, what was printed, and the errors.

    They are forks of one process that has loaded what takes long.
    """
    process = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(lines),
        cwd=cwd,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", **os.environ},
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=True,
    )
    return [(code, out, error) for code, out, error in json.loads(process.stdout)]


def make_plan(config: DictConfig) -> tuple[Plan, Timeline]:
    """The plan of a configuration, and its simulated timeline."""
    prediction = predict(task_of(config))
    return prediction.plan, prediction.timeline
