"""The scenarios on the command line: `python -m tests.acceptance.scenarios [names]`; without names, all of them."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.acceptance.scenarios import scenarios
from tests.acceptance.scenarios.marks import mark_of
from tests.acceptance.scenarios.runner import run_scenarios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    outcomes = run_scenarios(parser.parse_args().names or list(scenarios()))
    for outcome in outcomes:
        if outcome.kind != mark_of(outcome.name):
            print(f"--- {outcome.name}: {outcome.kind}, marked {mark_of(outcome.name)}\n{outcome.message}\n")
    print(dict(Counter(outcome.kind for outcome in outcomes)))


if __name__ == "__main__":
    main()
