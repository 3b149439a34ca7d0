"""Lightning's own tests with the strategy in place of the default, from a checkout that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.acceptance.lightning_suite.__main__ import ASIDE, CHECKOUT, explained, reason_of, run

needs_a_checkout = pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"needs a checkout of Lightning ({CHECKOUT})")


@needs_a_checkout
@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_flags_of_the_trainer(tmp_path: Path) -> None:
    folder = Path(os.environ[CHECKOUT]) / "tests"
    lines = run(folder, ["tests_pytorch/trainer/flags"], tmp_path / "results.jsonl", inject=True)
    chosen = {test: line["outcome"] for test, line in lines.items() if line["chosen"]}
    judged = [outcome for test, outcome in chosen.items() if not reason_of(test, explained()).startswith(ASIDE)]
    assert judged.count("passed") >= 0.97 * len(judged)


def test_every_exception_has_a_reason() -> None:
    assert all(explained().values())
