"""Scripts on the pages of the documentation run as they stand there, in the processes that they start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.interpreter import Program, run_ranks
from tests.pages import DOCS, SITE, scripts

NEEDS = {"howto/lora.md": "peft", "howto/hugging_face.md": "transformers"}
FIRST = "tutorials/first_pipeline.md"
ELSEWHERE = {"reference/python.md"}
"""Run by another test, whole."""

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

PAGES = [name for page in SITE if scripts(page) and (name := str(page.relative_to(DOCS))) not in ELSEWHERE]


def test_there_are_scripts() -> None:
    assert len(PAGES) >= 7


@pytest.mark.acceptance
@pytest.mark.parametrize("page", PAGES)
def test_they_run(page: str, tmp_path: Path) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    for name, code in scripts(DOCS / page).items():
        (tmp_path / name).write_text(code)
        ended, output = Program(name, cwd=tmp_path, environment=ENVIRONMENT).outcome(170)
        assert ended == 0, output


def test_the_first_one_runs(tmp_path: Path) -> None:
    """In the processes of torchrun, which are there sooner than those that a script starts."""
    for name, code in scripts(DOCS / FIRST).items():
        (tmp_path / name).write_text(code)
        ended = run_ranks(3, name, cwd=tmp_path, timeout=170, environment=ENVIRONMENT)
        assert ended.returncode == 0, ended.stderr
