"""The zoo on the command line: `python -m tests.acceptance --processes 2 bert gpt2`; without names, all models."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.acceptance.harness import run_zoo
from tests.acceptance.models import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--replicas", action="store_true", help="let the planner replicate stages")
    parser.add_argument("--timed", action="store_true", help="set up again with a plan, for its CPU seconds")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    given = parser.parse_args()
    outcomes = run_zoo(given.processes, given.names or list(zoo()), None if given.replicas else 1, given.timed)
    for outcome in outcomes:
        first = outcome.message.strip().splitlines()[-1 if outcome.kind == "crashed" else 0 :][:1]
        print(
            f"{outcome.name:28} {outcome.kind:13} {outcome.error:8.1e} {outcome.search:6.2f} s {outcome.set_up:6.2f} s "
            f"{len(outcome.stages)} {' '.join(first)[:400]}"
        )
    print(dict(Counter(outcome.kind for outcome in outcomes)))
    for column in ("search", "set_up"):
        seconds = [found for outcome in outcomes if (found := getattr(outcome, column))]
        middle, most = (statistics.median(seconds), max(seconds)) if seconds else (0.0, 0.0)
        print(f"{column}, of {len(seconds)} models: median {middle:.2f} CPU seconds, at most {most:.2f}")
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    main()
