"""A reader of one training step, or of the making of one plan, passes few files."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.commands import ROOT

pytestmark = pytest.mark.acceptance


def test_few_files_are_passed() -> None:
    command = [sys.executable, "-m", "benchmarks.journey"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = re.findall(r"\| a (?:training )?(step|plan) \| (\d+) \| (\d+) \|", ended.stdout)
    passed = {name: (int(files), int(changes)) for name, files, changes in rows}
    assert passed["step"][0] <= 20
    assert passed["step"][1] <= 340
    assert passed["plan"][0] <= 45
