"""The operators of a workload as JSON, for gpp-plan.

python -m benchmarks.workloads candle_uno > candle_uno.json
gpp-plan graph=candle_uno.json cluster=summit cluster.num_nodes=4 batch_size=32768
"""

from __future__ import annotations

import argparse

from benchmarks.workloads import WORKLOADS, graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=WORKLOADS, help="of the workload")
    print(graph(parser.parse_args().name).to_json())


if __name__ == "__main__":
    main()
