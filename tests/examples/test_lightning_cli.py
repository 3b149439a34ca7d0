"""Lightning's own command line trains in stages: two processes, with arguments of the strategy, and by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interpreter import ROOT, run_ranks

pytest.importorskip("jsonargparse")

PAGE = (ROOT / "docs/reference/commands.md").read_text()
(LINE,) = re.findall(r"^python (-m gpp_examples\.lightning_cli .*\n.*)", PAGE, re.M)


@pytest.mark.parametrize("strategy", ["with arguments", pytest.param("gpp", marks=pytest.mark.acceptance)])
def test_it_trains(strategy: str, tmp_path: Path) -> None:
    line = LINE.replace("\\\n", " ")
    if strategy == "gpp":
        line = re.sub(r"--trainer\.strategy .*_batches 4", "--trainer.strategy gpp", line)
    short = ("--trainer.limit_train_batches", "2")
    ended = run_ranks(2, *line.split(), *short, cwd=tmp_path, timeout=170)
    assert ended.returncode == 0, ended.stderr
    assert "`max_epochs=1` reached" in ended.stdout + ended.stderr
    assert "The plan" in ended.stdout + ended.stderr
