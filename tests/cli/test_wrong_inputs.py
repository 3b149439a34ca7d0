"""Wrong inputs to every command end with a paragraph that names the key or file, and without a traceback.

`make test` runs a sample of them, and those of test_mistakes.py.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.commands import commands
from tests.cli.test_mistakes import MISTAKES, PROJECT
from tests.cli.wrong_inputs import FILES, LINES

Result = tuple[int, str, str]
SAMPLE = [line for line in LINES if re.match("gpp-(init|checkpoint)", line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("careless")
    for name, text in {**PROJECT, **FILES}.items():
        (made / name).parent.mkdir(exist_ok=True, parents=True)
        (made / name).write_text(text, encoding="latin-1")
    return made


def results(lines: list[str], folder: Path) -> dict[str, Result]:
    words = [shlex.split(line) for line in lines]
    ran = commands([(w[0].removeprefix("gpp-"), *w[1:]) for w in words], cwd=folder, timeout=1700)
    return dict(zip(lines, ran, strict=True))


@pytest.fixture(scope="module")
def sampled(folder: Path) -> dict[str, Result]:
    return results(SAMPLE, folder)


@pytest.fixture(scope="module")
def others(folder: Path) -> dict[str, Result]:
    return results([line for line in LINES if line not in SAMPLE], folder)


def check(line: str, result: Result) -> None:
    code, _, error = result
    assert code in (1, 2), error
    assert "Traceback" not in error, error
    assert re.search(LINES[line], " ".join(error.split())), error


def test_there_are_many() -> None:
    assert len(LINES) + len(MISTAKES) >= 150


@pytest.mark.parametrize("line", SAMPLE)
def test_a_sample_is_told(line: str, sampled: dict[str, Result]) -> None:
    check(line, sampled[line])


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("line", [line for line in LINES if line not in SAMPLE])
def test_others_are_told(line: str, others: dict[str, Result]) -> None:
    check(line, others[line])
