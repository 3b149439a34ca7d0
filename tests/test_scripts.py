"""Scripts on the pages of the documentation run as they stand there, in the processes that they start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.interpreter import Program
from tests.pages import DOCS, SITE, scripts

NEEDS = {"howto/lora.md": "peft", "howto/hugging_face.md": "transformers"}
FIRST = "tutorials/first_pipeline.md"
ELSEWHERE = {"reference/python.md"}
"""Run by another test, whole."""

PAGES = [name for page in SITE if scripts(page) and (name := str(page.relative_to(DOCS))) not in ELSEWHERE]


def test_there_are_scripts() -> None:
    assert len(PAGES) >= 7


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page == FIRST else pytest.mark.acceptance) for page in PAGES]
)
def test_they_run(page: str, tmp_path: Path) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name, code in scripts(DOCS / page).items():
        (tmp_path / name).write_text(code)
        ended, output = Program(name, cwd=tmp_path, environment=environment).outcome(170)
        assert ended == 0, output
