"""What asynchrony does to the loss: every weight policy at the delays of 8 and 12 stages, on one device.

    python -m benchmarks.quality --results quality.jsonl [--write benchmarks/results/quality.md]

Runs what is missing in the file of results, in about an hour, and prints the tables; run it from the repository's root.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.quality.sweep import outcomes, sweep
from benchmarks.quality.tables import pages, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, required=True, help="a line for each run; runs that it has are not repeated"
    )
    parser.add_argument("--write", type=Path, help="a page; the tables go between its marks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sweep(arguments.results)
    tables = pages(outcomes(arguments.results))
    print(tables)
    if arguments.write is not None:
        write(arguments.write, tables)


if __name__ == "__main__":
    main()
