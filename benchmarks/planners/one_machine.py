"""Figure 6 of the GraphPipe paper on a machine of published figures, with one fitted number for each model.

    python -m benchmarks.planners.one_machine [models ...]

Published: four V100 of 16 GB per node with NVLink, one EDR InfiniBand port (12.5 GB/s) for the node; mini-batches grow
with the devices; mmt has 16 samples for each. Fitted: the FLOP/s that a model's products reach, such that PipeDream has
the paper's throughput on four devices. Open: samples per device of dlrm and candle_uno; several are shown. The other
cells are predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np

from benchmarks.planners.common import Hardware, run, table
from benchmarks.planners.figure6 import CONSTANT, agrees
from benchmarks.planners.paper import NUM_DEVICES, THROUGHPUT
from benchmarks.workloads import graph

MACHINE: Final = Hardware(flops=0.0, seconds_per_operator=10e-6, network=12.5e9, shared="node", in_place=True)

SLOWEST, FASTEST, PRECISION = 5e12, 80e12, 1.02
"""FLOP/s between which a model's speed is searched for, and the ratio at which that ends."""

SAMPLES_PER_DEVICE: Final = {
    "mmt": (16, 32, 64),
    "dlrm": (64, 128, 256, 512, 1024, 4096),
    "candle_uno": (64, 128, 256, 512, 1024, 4096),
}


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A model with some samples per device: the fitted FLOP/s, and by `NUM_DEVICES` the throughput of PipeDream and the
    ratio of GraphPipe's.
    """

    model: str
    samples: int
    flops: float
    pipedream: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def published(self) -> list[float]:
        """The paper's ratios."""
        ours, theirs = (THROUGHPUT[self.model][name] for name in ("graphpipe", "pipedream"))
        return [a / b for a, b in zip(ours, theirs, strict=True)]

    @property
    def agreeing(self) -> int:
        """Number of ratios that agree with the paper's."""
        return sum(agrees(ours, theirs) for ours, theirs in zip(self.ratios, self.published, strict=True))


def throughput(partitioner: str, model: str, num_devices: int, samples: int, flops: float) -> float:
    """Samples per second with `samples` per device."""
    problem = replace(MACHINE, flops=flops).problem(graph(model), num_devices, num_devices * samples)
    return run(partitioner, problem).samples_per_second


def fitted_flops(model: str, samples: int) -> float | None:
    """FLOP/s at which PipeDream has the paper's throughput on the fewest devices; None if none is high enough."""
    wanted, low, high = THROUGHPUT[model]["pipedream"][0], SLOWEST, FASTEST
    if throughput("pipedream", model, NUM_DEVICES[0], samples, high) < wanted:
        return None
    while high / low > PRECISION:
        middle = float((low * high) ** 0.5)
        if throughput("pipedream", model, NUM_DEVICES[0], samples, middle) < wanted:
            low = middle
        else:
            high = middle
    return high


def predictions(model: str) -> Iterator[FittedModel]:
    for samples in SAMPLES_PER_DEVICE[model]:
        flops = fitted_flops(model, samples)
        if flops is not None:
            theirs, ours = (
                tuple(throughput(name, model, number, samples, flops) for number in NUM_DEVICES)
                for name in ("pipedream", "graphpipe")
            )
            ratios = tuple(a / b for a, b in zip(ours, theirs, strict=True))
            yield FittedModel(model, samples, flops, theirs, ratios)


def row(entry: FittedModel) -> list[object]:
    ratios = (f"{ours:.2f} ({theirs:.2f})" for ours, theirs in zip(entry.ratios, entry.published, strict=True))
    published = THROUGHPUT[entry.model]["pipedream"]
    speeds = (f"{ours:.0f} ({theirs:.0f})" for ours, theirs in zip(entry.pipedream, published, strict=True))
    return [entry.model, entry.samples, f"{entry.flops / 1e12:.1f}", *speeds, *ratios, entry.agreeing]


def combined(entries: tuple[FittedModel, ...]) -> list[object]:
    """Samples per device of all models, ratios that agree, and the rank correlation with the paper's."""
    pairs = [pair for entry in entries for pair in zip(entry.ratios, entry.published, strict=True)]
    ranks = (np.argsort(np.argsort(ratios)) for ratios in zip(*pairs, strict=True))
    correlation = float(np.corrcoef(*ranks)[0, 1])
    samples = " ".join(str(entry.samples) for entry in entries)
    return [samples, f"{sum(entry.agreeing for entry in entries)} of {len(pairs)}", f"{correlation:+.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SAMPLES_PER_DEVICE))
    models = parser.parse_args().models
    found = {model: list(predictions(model)) for model in models}
    header = ["model", "samples per device", "TFLOP/s", *(f"pipedream, {number}" for number in NUM_DEVICES)]
    header += [*(f"ratio, {number}" for number in NUM_DEVICES), "agree"]
    print(table(header, [row(entry) for entries in found.values() for entry in entries]))
    rows = [combined(entries) for entries in product(*found.values())]
    print("", table([" ".join(models), "agree", "rank correlation"], rows), sep="\n")
    published = [ratio for entries in found.values() for ratio in entries[0].published]
    null = sum(agrees(CONSTANT, ratio) for ratio in published)
    print(f"\nA constant ratio of {CONSTANT} agrees with {null} of {len(published)}.")


if __name__ == "__main__":
    main()
