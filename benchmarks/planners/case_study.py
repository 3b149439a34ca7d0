"""The gain of branches: the GraphPipe paper's case study, rising numbers of branches, and micro-batches in flight.

python -m benchmarks.planners.case_study [--seconds 10]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import nn

from benchmarks.planners.common import run, simulated, table, verdict
from benchmarks.planners.paper import BATCH_SIZES, HARDWARE, NUM_DEVICES
from benchmarks.workloads import graph
from benchmarks.workloads.recommendation import WIDTH, candle_uno
from benchmarks.workloads.workload import Built
from lightning_gpp.capture import capture_step
from lightning_gpp.planning import Draft, DraftStage, Evaluator, Prediction, Problem
from lightning_gpp.schedules.one_f_one_b import in_flight_samples

MINI_BATCH = 64
"""Samples of the case study, for which the paper states none."""


BY_LAYERS = (7, 5, 3, 1, 6, 4, 2, 0)
"""Devices of the case study's stages with which the join, and each layer of both branches, is inside a node."""


def draft_of(
    problem: Problem, stage_of: Callable[[str], int], size: int, devices: Sequence[int], *, chained: bool
) -> Draft:
    """One device per stage; the last stage, the one of the user's step, is on device 0."""
    groups: dict[int, list[int]] = {}
    for index, unit in enumerate(problem.units.units):
        groups.setdefault(stage_of(unit.modules[0]), []).append(index)
    stages = tuple(
        DraftStage(units=tuple(groups[number]), devices=(devices[number],), micro_batch_size=size)
        for number in sorted(groups)
    )
    return Draft(stages=stages, chained=chained)


def layer_of_case_study(module: str) -> int:
    """The stage of a module: branch 1 first, then branch 0, whose last layer shares its stage with the head."""
    if not module.startswith("branches."):
        return 7
    _, branch, layer, *_ = module.split(".")
    return int(layer) + (4 if branch == "0" else 0)


def case_study() -> Iterator[str]:
    """Section 7.5: two branches of four layers, one layer per device; the partition is always the same.

    A chain is laid out in its order, so that one of its edges leaves the node, the graph by layers.
    """
    problem = HARDWARE.problem(graph("case_study"), 8, MINI_BATCH)
    rows: list[list[object]] = []
    results: dict[tuple[bool, int], Prediction] = {}
    for chained, size in ((True, 2), (False, 2), (True, 4), (False, 4)):
        devices = range(7, -1, -1) if chained else BY_LAYERS
        draft = draft_of(problem, layer_of_case_study, size, devices, chained=chained)
        prediction = results[chained, size] = simulated(problem, draft)
        most = max(Evaluator(problem)(draft).in_flight) * size
        gain = prediction.samples_per_second / results[True, 2].samples_per_second - 1
        name, peak = "a chain" if chained else "a graph", max(prediction.timeline.peak_bytes) / 1e9
        rows.append(
            [
                name,
                size,
                prediction.plan.depth,
                most,
                f"{peak:.2f}",
                f"{prediction.samples_per_second:.0f}",
                f"{gain:+.1%}",
            ]
        )
    header = ["stages as", "micro-batch", "depth", "most samples in flight", "peak, GB", "samples/s", "gain"]
    yield table(header, rows)
    yield from _gains(results)


def _gains(results: dict[tuple[bool, int], Prediction]) -> Iterator[str]:
    seconds = {key: prediction.timeline.makespan for key, prediction in results.items()}
    warm_up, larger = seconds[True, 2] / seconds[False, 2] - 1, seconds[False, 2] / seconds[False, 4] - 1
    both = seconds[True, 2] / seconds[False, 4] - 1
    yield (
        f"\nShorter warm-up {warm_up:+.1%} (paper +10%), larger micro-batches {larger:+.1%} (+10%), both {both:+.1%} "
        f"(+20%). Depth {results[True, 2].plan.depth} to {results[False, 2].plan.depth} (8 to 4, where the stage with "
        f"the join is not counted). Goal, at least 10 % together: {verdict(both >= 0.1)}."
    )


def against_the_chain() -> Iterator[str]:
    """The graph and the chain of the case study with larger mini-batches: without slack, and with one micro-batch."""
    rows, ratios = list[list[object]](), list[float]()
    for batch_size, size in product((64, 256, 1024), (2, 4)):
        problem = HARDWARE.problem(graph("case_study"), 8, batch_size)
        chain = simulated(problem, draft_of(problem, layer_of_case_study, size, range(7, -1, -1), chained=True))
        draft = draft_of(problem, layer_of_case_study, size, BY_LAYERS, chained=False)
        *others, last = draft.stages
        ahead = replace(draft, stages=(*(replace(stage, slack=1) for stage in others), last))
        tight, slack = simulated(problem, draft), simulated(problem, ahead)
        gains = [chain.seconds / other.seconds - 1 for other in (tight, slack)]
        peaks = (f"{max(entry.peak_bytes) / 1e9:.2f}" for entry in (chain, tight, slack))
        rows.append([batch_size, size, *(f"{gain:+.1%}" for gain in gains), *peaks])
        ratios.append(gains[1])
    header = [
        "samples",
        "micro-batch",
        "graph over chain",
        "with slack 1",
        "peak of the chain, GB",
        "graph",
        "with slack",
    ]
    yield table(header, rows)
    yield f"\nWith slack the graph is never slower than the chain of the same stages: {verdict(min(ratios) >= 0)}."


def many_branches(seconds: float) -> Iterator[str]:
    """Section 7.3: CANDLE-Uno with as many devices as branches."""
    names = ("pipedream", "graphpipe", "auto")
    rows, gains = [], []
    for trunk, number in product((4, 0), (4, 8, 16)):
        batch_size = BATCH_SIZES["candle_uno"][NUM_DEVICES.index(number)]
        problem = _problem(with_trunk(number, trunk), number, batch_size)
        runs = [run(name, problem, seconds) for name in names]
        base, *others = (entry.samples_per_second for entry in runs)
        gains.append(others[0] / base)
        columns = [f"{base:.0f}", *(f"{other:.0f} ({other / base:.2f})" for other in others)]
        rows.append([trunk, number, *columns, *runs])
    yield table(["trunk layers", "branches and devices", *names, *(f"plan of {name}" for name in names)], rows)
    yield (
        "\nThe paper, whose trunk is not known: up to 2 times PipeDream with 16 branches, more with more branches. "
        f"Here {gains[2]:.2f} with a trunk of four layers, {gains[5]:.2f} without; at least 2.00: "
        f"{verdict(gains[5] >= 2)}; growing without a trunk: {verdict(gains[3] < gains[4] < gains[5])}."
    )


def with_trunk(num_branches: int, num_layers: int) -> Built:
    """CANDLE-Uno with a trunk of four layers or none; then the head reads all towers."""
    with torch.device("meta"):
        model, batch = candle_uno(num_branches).build()
        if not num_layers:
            model.trunk, model.head = nn.Identity(), nn.Linear(num_branches * WIDTH, 1)
    return model, batch


def in_flight() -> Iterator[str]:
    """The authors' partition of CANDLE-Uno with five towers, in micro-batches of 64."""
    problem = _problem(with_trunk(5, 4), 6, 16 * 64)
    rows, all_equal = [], True
    for chained, expected in ((True, [384, 320, 256, 192, 128, 64]), (False, [192, 192, 192, 192, 128, 64])):
        prediction = simulated(problem, draft_of(problem, _stage_of_candle, 64, range(5, -1, -1), chained=chained))
        counts = [in_flight_samples(prediction.plan)[index] for index in range(len(expected))]
        all_equal &= counts == expected
        rows.append(["chain" if chained else "graph", *counts])
    yield table(["stages as", *(f"tower {n}" for n in range(1, 5)), "tower 0 and join", "trunk"], rows)
    yield f"\nThe figures of the authors' strategy files: {verdict(all_equal)}."


def _problem(built: Built, num_devices: int, batch_size: int) -> Problem:
    return HARDWARE.problem(capture_step(*built).graph, num_devices, batch_size)


def _stage_of_candle(module: str) -> int:
    """The stage of a module: towers 1 to 4, tower 0 with the first layer of the trunk, the rest of the trunk."""
    part, *rest = module.split(".")
    if part == "towers":
        return int(rest[0]) - 1 if rest[0] != "0" else 4
    return 4 if module == "trunk.0" else 5


SECTIONS: Sequence[tuple[str, Callable[[float], Iterator[str]]]] = (
    ("Case study: two branches of four layers on 8 devices", lambda seconds: case_study()),
    ("Slack", lambda seconds: against_the_chain()),
    ("More branches", many_branches),
    ("Samples in flight", lambda seconds: in_flight()),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a search of auto")
    options = parser.parse_args()
    for title, section in SECTIONS:
        print(f"\n### {title}\n", *section(options.seconds), sep="\n")


if __name__ == "__main__":
    main()
