"""A reader of one training step, or of the making of one plan, passes few files."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.commands import ROOT

FILES_OF_STEP, CHANGES_OF_STEP, FILES_OF_PLAN = 33, 500, 56
"""Today's figures. Another file in a step is a feature that every step pays for; in a plan, every search."""

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]


def test_few_files_are_passed() -> None:
    command = [sys.executable, "-m", "benchmarks.journey"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = re.findall(r"\| a (?:training )?(step|plan) \| (\d+) \| (\d+) \|", ended.stdout)
    passed = {name: (int(files), int(changes)) for name, files, changes in rows}
    assert passed["step"][0] <= FILES_OF_STEP
    assert passed["step"][1] <= CHANGES_OF_STEP
    assert passed["plan"][0] <= FILES_OF_PLAN
