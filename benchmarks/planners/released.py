"""CPU time of PipeDream's released planner and of ours, on the paper's models and 32 devices.

    git clone https://github.com/msr-fiddle/pipedream && pip install graphviz
    python -m benchmarks.planners.released pipedream [--models mmt2 dlrm ...]

The release plans for one micro-batch size, so it runs once for each size that our partitioners try. It gets the units
as a chain, with the seconds, bytes and bandwidths of the same problem, for 4 devices in each of 8 nodes. Writing files
is not counted. For our planners the quickest of five runs counts.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from math import inf
from pathlib import Path
from types import ModuleType

from benchmarks.planners.common import table, verdict
from benchmarks.planners.search_time import MODELS, NUM_DEVICES, TIMES_FASTER, least, problem_for
from lightning_gpp.planning import Problem
from lightning_gpp.planning.problem.partitioner import partitioner_of


def release(clone: Path) -> ModuleType:
    """The module with PipeDream's planner, with the settings of its command line at their defaults."""
    sys.path[:0] = [str(clone), str(clone / "optimizer")]
    module = importlib.import_module("optimizer_graph_hierarchical")
    for name in ("straight_pipeline", "use_memory_constraint", "use_fewer_machines"):
        setattr(module, name, False)
    module.activation_compression_ratio = None  # type: ignore[attr-defined]
    return module


def profile(problem: Problem, size: int) -> str:
    """The units as a chain in the release's format: milliseconds and bytes of a micro-batch."""
    seconds, parameters = problem.seconds(size), problem.parameter_bytes
    sent = [0.0] * problem.num_units
    for value in problem.units.values:
        sent[value.src] += value.bytes.at(size)
    backward = seconds.input_gradient + seconds.weight_gradient
    nodes = [
        f"node{unit} -- Unit -- forward_compute_time={1e3 * seconds.forward[unit]}, "
        f"backward_compute_time={1e3 * backward[unit]}, activation_size={sent[unit]}, "
        f"parameter_size={parameters[unit]}"
        for unit in range(problem.num_units)
    ]
    return "\n".join([*nodes, *(f"\tnode{unit} -- node{unit + 1}" for unit in range(problem.num_units - 1))])


def released_seconds(planner: ModuleType, problem: Problem) -> float:
    """CPU time of the release for all micro-batch sizes."""
    inside, between = (level.link.bytes_per_second for level in problem.cluster.levels)
    nodes = len(set(problem.cluster.levels[0].groups))
    numbers = [problem.num_devices // nodes, nodes]
    total = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for size in problem.sizes:
            path = Path(folder, f"{size}.txt")
            path.write_text(profile(problem, size))
            began = time.process_time()
            with redirect_stdout(io.StringIO()):
                planner.main(numbers, str(path), [inside, between], inf, False, False, False, None, None)
            total += time.process_time() - began
    return total


def compared(planner: ModuleType, models: list[tuple[str, float]]) -> Iterator[str]:
    rows, ratios = [], []
    for model, num_pieces in models:
        print(f"{model}, {num_pieces} pieces: release", file=sys.stderr, flush=True)
        problem = problem_for(model, num_pieces)
        theirs = released_seconds(planner, problem)
        pipedream, graphpipe = (
            least(partitioner_of(name), model, num_pieces).seconds for name in ("pipedream", "graphpipe")
        )
        ratio, sizes = theirs / graphpipe, len(problem.sizes)
        ratios += [ratio] if num_pieces == inf else []
        row = [f"{theirs:.2f} s", f"{1e3 * pipedream:,.0f} ms", f"{1e3 * graphpipe:,.0f} ms", f"{ratio:,.0f}"]
        rows.append([model, problem.num_units, sizes, *row])
    header = [
        "model",
        "units",
        "sizes",
        "released PipeDream",
        "our pipedream",
        "graphpipe",
        "times faster than released",
    ]
    yield table(header, rows)
    num = sum(ratio >= TIMES_FASTER for ratio in ratios)
    yield (
        f"\nAt least {TIMES_FASTER} times faster where units are operators: {num} of {len(ratios)}: "
        f"{verdict(num == len(ratios))}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="folder of PipeDream's repository")
    parser.add_argument("--models", nargs="*", default=sorted({model for model, _ in MODELS}), help="all by default")
    options = parser.parse_args()
    wanted = [(model, pieces) for model, pieces in MODELS if model in options.models]
    print(f"{NUM_DEVICES} devices", *compared(release(options.clone), wanted), sep="\n", flush=True)


if __name__ == "__main__":
    main()
