"""Figure 6 of the GraphPipe paper: throughput of the partitioners on the paper's models, from 4 to 32 devices.

    python -m benchmarks.planners.figure6 [models ...] [--seconds 10]

`benchmarks.planners.paper` has the choices that the paper leaves open. PipeDream and Piper run their stages as a chain.
All throughputs are those of the simulated program that would run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from benchmarks.planners.common import Run, run, table, typical_deviation, verdict
from benchmarks.planners.paper import BATCH_SIZES, HARDWARE, LAYERS, NUM_DEVICES, THROUGHPUT
from benchmarks.workloads import graph

CLOSE = 0.15
"""Deviation of a ratio from the paper's that still counts as agreement."""

CONSTANT = 1.25
"""The ratio that the null model has for all cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model on one number of devices."""

    model: str
    num_devices: int
    runs: dict[str, Run]

    def throughput(self, name: str) -> float:
        return self.runs[name].samples_per_second

    def published(self, name: str) -> float:
        return THROUGHPUT[self.model].get(name, (0.0,) * 4)[NUM_DEVICES.index(self.num_devices)]

    def ratios(self, base: str) -> tuple[float, float]:
        """GraphPipe's throughput over another partitioner's: ours, the paper's."""
        ours, theirs = self.throughput(base), self.published(base)
        return self.throughput("graphpipe") / ours, self.published("graphpipe") / theirs


def cell(model: str, num_devices: int, seconds: float) -> Cell:
    batch_size = BATCH_SIZES[model][NUM_DEVICES.index(num_devices)]
    fine = HARDWARE.problem(graph(model), num_devices, batch_size)
    coarse = HARDWARE.problem(graph(model), num_devices, batch_size, LAYERS.get(model, inf))
    runs = {name: run(name, fine, seconds) for name in ("pipedream", "graphpipe", "auto")}
    return Cell(model=model, num_devices=num_devices, runs={**runs, "piper": run("piper", coarse)})


def throughputs(cells: list[Cell]) -> str:
    names = ("pipedream", "piper", "graphpipe", "auto")
    header = ["model", "devices", *names, "auto / graphpipe", *(f"plan of {name}" for name in names)]
    return table(header, [_throughput(entry, names) for entry in cells])


def _throughput(entry: Cell, names: tuple[str, ...]) -> list[object]:
    return [
        entry.model,
        entry.num_devices,
        *(_beside(entry.throughput(name), entry.published(name)) for name in names),
        f"{entry.throughput('auto') / entry.throughput('graphpipe'):.2f}",
        *(entry.runs[name] for name in names),
    ]


def _beside(ours: float, theirs: float) -> str:
    return (f"{ours:.0f}" if ours else "none") + (f" ({theirs:.0f})" if theirs else "")


def comparisons(cells: list[Cell]) -> Iterator[tuple[Cell, str, float, float]]:
    """All pairs of ratios: cell, partitioner compared with GraphPipe, our ratio, the paper's."""
    for entry in cells:
        for base in ("pipedream", "piper"):
            if entry.throughput(base) and entry.published(base):
                yield entry, base, *entry.ratios(base)


def agrees(ours: float, theirs: float) -> bool:
    """True if the same partitioner is faster, by about as much; a ratio within 2 % of 1 counts for either."""
    same_side = (ours - 1) * (theirs - 1) > 0 or abs(ours - 1) < 0.02
    return same_side and abs(ours / theirs - 1) <= CLOSE


def ratio_table(cells: list[Cell]) -> str:
    header = ["model", "devices", "graphpipe over", "here", "paper", "deviation", "agrees"]
    return table(
        header,
        [
            [entry.model, entry.num_devices, base, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs - 1:+.0%}"]
            + ["yes" if agrees(ours, theirs) else "no"]
            for entry, base, ours, theirs in comparisons(cells)
        ],
    )


def goals(cells: list[Cell]) -> Iterator[str]:
    pairs = list(comparisons(cells))
    num = sum(agrees(ours, theirs) for _, _, ours, theirs in pairs)
    yield f"Ratios that agree in direction and within {CLOSE:.0%}: {num} of {len(pairs)}."
    yield from null_model(pairs)
    behind = [c for c in cells if c.throughput("auto") < c.throughput("graphpipe") * (1 - 1e-9)]
    yield f"auto is never behind graphpipe: {verdict(not behind)} in {len(cells) - len(behind)} of {len(cells)} cells."
    for c in cells:
        if (c.model, c.num_devices) == ("candle_uno", 4):
            ratio = c.throughput("auto") / c.throughput("pipedream")
            yield f"candle_uno on 4 devices: auto over PipeDream {ratio:.2f}; at least 1.00: {verdict(ratio >= 1)}."


def null_model(pairs: list[tuple[Cell, str, float, float]]) -> Iterator[str]:
    """A constant ratio instead of our planners' programs, and whether cells that gain more here do in the paper."""
    num = sum(agrees(CONSTANT, theirs) for _, _, _, theirs in pairs)
    yield f"A constant ratio of {CONSTANT} for all cells agrees with {num} of {len(pairs)}."
    ours, theirs = zip(*((ours, theirs) for _, base, ours, theirs in pairs if base == "pipedream"), strict=True)
    if len(ours) > 2:
        correlation = float(np.corrcoef(*(np.argsort(np.argsort(ratios)) for ratios in (ours, theirs)))[0, 1])
        yield f"Rank correlation of the {len(ours)} ratios over pipedream, here and in the paper: {correlation:+.2f}."


def deviations(cells: list[Cell]) -> Iterator[str]:
    for name in ("pipedream", "graphpipe"):
        pairs = [(c.throughput(name), c.published(name)) for c in cells if c.throughput(name)]
        yield f"Throughput of {name}: typically {typical_deviation(*zip(*pairs, strict=True)):.0%} off the paper's."


def refusals(cells: list[Cell]) -> Iterator[str]:
    """Piper's notes for models without a plan."""
    said: dict[str, str] = {}
    for c in cells:
        if c.runs["piper"].prediction is None:
            said.setdefault(c.model, " ".join(c.runs["piper"].answer.notes))
    for model, notes in said.items():
        yield f"Piper on {model}: {notes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(THROUGHPUT), help="of the paper")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a search of auto")
    options = parser.parse_args()
    cells = [cell(model, number, options.seconds) for model in options.models for number in NUM_DEVICES]
    print("Samples per second, in parentheses the paper's; plans: stages, depth, samples of a micro-batch.\n")
    print(throughputs(cells), ratio_table(cells), sep="\n\n", end="\n\n")
    print(*(f"- {line}" for part in (deviations, goals, refusals) for line in part(cells)), sep="\n")


if __name__ == "__main__":
    main()
