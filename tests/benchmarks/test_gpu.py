"""`make gpu` says what it has run and what not, and finds no error where it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import coverage
from benchmarks.gpu.features import FEATURES
from benchmarks.gpu.parts import ARITHMETICS, correctness
from benchmarks.gpu.seats import ALONE, CPU, CPUS, NCCL, SHARED, SOCKETS
from tests.cli.commands import ROOT

PAGE = ROOT / "benchmarks" / "results" / "gpu.md"


def test_the_report_says_what_has_not_been_run() -> None:
    without, single, several = (
        "\n".join(coverage(s)) for s in ([CPUS, CPU], [SOCKETS, SHARED, ALONE], [NCCL, SHARED, ALONE])
    )
    assert "No line of this library has run on a GPU" in without
    assert f"Has not been run:** {NCCL.name}; {SHARED.name}; {ALONE.name}; {SOCKETS.name}." in without
    assert "NCCL has not been run between GPUs" in single
    assert several.split("\n\n")[1:] == [f"**Has not been run:** {SOCKETS.name}; {CPUS.name}; {CPU.name}.\n"]


def test_the_page_is_a_report() -> None:
    page = PAGE.read_text()
    assert re.findall("^## (.*)", page, re.MULTILINE) == [
        *("Correctness", "Features", "Predicted and measured"),
        *("Stages against the undivided model", "Beside torch.distributed.pipelining", "Sharding", "Traces"),
    ]
    assert "**NO**" not in page
    assert ("0 GPUs" in page) == ("No line of this library has run on a GPU" in page)


def test_features_have_no_error_and_gradients_are_those_of_the_undivided_model() -> None:
    names = ("noise on the device", "tensors on self.device", "float16 and a scaled loss")
    tried = [feature for feature in FEATURES if feature.name in names]
    calls = [*(feature.error for feature in tried), partial(correctness, arithmetic=ARITHMETICS[0])]
    *errors, (((loss, gradient),), failed) = CPU.run_each(calls)
    assert len(tried) == len(names)
    for feature, (found, raised) in zip(tried, errors, strict=True):
        assert raised is None, raised
        assert max(found) <= feature.allowed, feature.name
    assert failed is None, failed
    assert max(loss, gradient) <= 1e-12


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_the_whole_report(tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path / "gpu.md"), "--folder", str(tmp_path / "traces")]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    report = (tmp_path / "gpu.md").read_text()
    assert "**NO**" not in report
    assert list((tmp_path / "traces").glob("trace-*-rank0.json"))
    kinds = "CUDA" if torch.cuda.is_available() else "| not run |"
    assert kinds in report
