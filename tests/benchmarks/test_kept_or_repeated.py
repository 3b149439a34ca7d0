"""Stages that recompute blocks, and stages with slack, take as long as simulated, and give the same gradients."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.commands import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]


def test_steps_take_as_long_as_simulated() -> None:
    command = [sys.executable, "benchmarks/schedules/kept_or_repeated.py", "--repetitions", "3"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr  # gradients and numbers of micro-batches in flight are as promised
    differences = [float(each) for each in re.findall(r"\| ([+-][\d.]+)% \| [+-][\d.]+% \|", ended.stdout)]
    assert len(differences) == 6
    assert max(map(abs, differences)) <= 5.0, ended.stdout
