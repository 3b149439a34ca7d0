"""Lightning's own tests with this library's strategy wherever they leave the strategy to Lightning.

    GPP_LIGHTNING_SUITE=~/pytorch-lightning python -m tests.acceptance.lightning_suite [tests_pytorch/trainer ...]

The checkout has to be of the installed version, and the packages of its `requirements/pytorch/test.txt` installed.
Tests that fail with the strategy run again without it: those that fail, too, say nothing about the strategy. Prints the
share that passes and every failure with its reason from `exceptions.txt`, or else with its last line. With
`--results FOLDER` the outcomes of all tests are kept there, and a run that was interrupted continues.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.acceptance.lightning_suite.plugin import ENDED, INJECT, RESULTS, lines_of

CHECKOUT = "GPP_LIGHTNING_SUITE"
FOLDERS = (
    *("callbacks", "checkpointing", "core", "loggers", "loops", "models", "overrides", "plugins", "profilers"),
    *("trainer", "tuner", "utilities"),
)
EXCEPTIONS = Path(__file__).with_name("exceptions.txt")
ASIDE = "internals:"
"""The beginning of the reasons of tests that say nothing about stages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=[f"tests_pytorch/{name}" for name in FOLDERS])
    parser.add_argument("--results", type=Path, help="folder for the outcomes of all tests")
    given = parser.parse_args()
    checkout = os.environ.get(CHECKOUT)
    if not checkout:
        sys.exit(f"{CHECKOUT} is not set: give it the path of a checkout of Lightning.")
    with tempfile.TemporaryDirectory() as scratch:
        results = given.results or Path(scratch)
        results.mkdir(parents=True, exist_ok=True)
        print(compare(Path(checkout) / "tests", given.tests, results.absolute()))


def compare(folder: Path, wanted: Sequence[str], results: Path) -> str:
    """Run tests with the strategy, and those that fail without it; return the report."""
    injected: dict[str, dict[str, Any]] = {}
    for tests in wanted:
        injected |= run(folder, [tests], results / f"injected-{Path(tests).name}.jsonl", inject=True)
    failed = [test for test, line in injected.items() if line["chosen"] and line["outcome"] == "failed"]
    plain = run(folder, failed, results / "plain.jsonl", inject=False) if failed else {}
    return report(injected, {test for test, line in plain.items() if line["outcome"] == "passed"}, explained())


def run(folder: Path, tests: Sequence[str], results: Path, *, inject: bool) -> dict[str, dict[str, Any]]:
    """The last line of every test, by its name relative to `folder`."""
    path = os.pathsep.join([str(Path.cwd()), str(folder), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, INJECT: str(int(inject)), RESULTS: str(results)}
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "--timeout",
        "120",
    ]
    plugin = ["-p", "tests.acceptance.lightning_suite.plugin"]
    command = [sys.executable, "-m", "pytest", *plugin, *options, *tests]
    ended = True
    while ended:
        subprocess.run(command, cwd=folder, env=variables, check=False)
        ended = any(line["error"] == ENDED for line in lines_of(results)[-1:])
    return {line["test"].removeprefix("tests/"): line for line in lines_of(results)}


def explained() -> dict[str, str]:
    """Beginnings of the names of tests that cannot pass, with the reason."""
    lines = (line.split("#") for line in EXCEPTIONS.read_text().splitlines() if line.strip() and line[0] != "#")
    return {name.strip(): reason.strip() for name, reason in lines}


def report(injected: dict[str, dict[str, Any]], passes_without: set[str], reasons: dict[str, str]) -> str:
    """The share of tests that pass, but for those that look at internals, and the failures with their reasons."""
    chosen = {test: line for test, line in injected.items() if line["chosen"]}
    passed = sum(line["outcome"] == "passed" for line in chosen.values())
    why = {test: reason_of(test, reasons) for test in sorted(passes_without)}
    aside = sum(reason.startswith(ASIDE) for reason in why.values())
    total, judged = passed + len(why), passed + len(why) - aside
    return "\n".join(
        [
            f"{passed} of {total} tests that pass without the strategy pass with it ({passed / max(1, total):.1%}). "
            f"{aside} of the others look at internals, which leaves {passed} of {judged} "
            f"({passed / max(1, judged):.1%}).",
            *(f"- {test}: {reason or cause(chosen[test])}" for test, reason in why.items()),
        ]
    )


def reason_of(test: str, reasons: dict[str, str]) -> str:
    """Why a test cannot pass; empty if nothing explains it."""
    return next((reason for name, reason in reasons.items() if test.startswith(name)), "")


def cause(line: dict[str, Any]) -> str:
    """The last line of a failure's message."""
    told = [text.strip() for text in line["error"].splitlines() if text.startswith("E ")]
    return told[-1][:160] if told else line["error"].strip()[-160:]


if __name__ == "__main__":
    main()
