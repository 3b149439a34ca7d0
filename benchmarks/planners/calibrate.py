"""What the GraphPipe paper leaves open about its machine, chosen by the throughputs of PipeDream that it shows.

    python -m benchmarks.planners.calibrate

Every model takes the mini-batch that suits a machine best; mmt's is stated. Machines are listed by the root mean square
of the logarithms of PipeDream's throughput over the paper's, on all models and numbers of devices: the same machine for
all. GraphPipe's throughputs have no part in it. mmt is planned by layers here, which is quicker.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import exp, inf, log
from typing import Final

from benchmarks.planners.common import Hardware, problem_of, run, table
from benchmarks.planners.paper import LAYERS, NUM_DEVICES, THROUGHPUT

SAMPLES_PER_DEVICE: Final = {"mmt": (16,), "dlrm": (64, 128), "candle_uno": (128, 256)}
FLOPS: Final = (30e12, 40e12, 50e12)
SECONDS_PER_OPERATOR: Final = (10e-6, 20e-6, 40e-6)
NETWORK: Final = (12.5e9, 12.5e9 / 2, 12.5e9 / 4)
SHARED: Final = ("node", "device")


def machines() -> Iterator[Hardware]:
    for flops, seconds, network, shared in product(FLOPS, SECONDS_PER_OPERATOR, NETWORK, SHARED):
        yield Hardware(flops=flops, seconds_per_operator=seconds, network=network, shared=shared)


def squares(machine: Hardware, model: str, samples: int) -> float:
    """Sum over the numbers of devices."""
    total = 0.0
    for number, published in zip(NUM_DEVICES, THROUGHPUT[model]["pipedream"], strict=True):
        problem = problem_of(model, machine.cluster(number), samples * number, LAYERS.get(model, inf))
        ours = run("pipedream", problem).samples_per_second
        total += log(ours / published) ** 2 if ours else inf
    return total


def fitted(machine: Hardware) -> tuple[float, dict[str, int]]:
    """The deviation, and the mini-batches per device that make it least."""
    chosen = {
        model: min((squares(machine, model, samples), samples) for samples in choices)
        for model, choices in SAMPLES_PER_DEVICE.items()
    }
    total = sum(square for square, _ in chosen.values())
    mean = total / len(chosen) / len(NUM_DEVICES)
    return exp(mean**0.5) - 1, {model: samples for model, (_, samples) in chosen.items()}


def main() -> None:
    found = sorted(((*fitted(machine), machine) for machine in machines()), key=lambda entry: entry[0])
    header = ["TFLOP/s", "us per operator", "GB/s between nodes", "shared by", *SAMPLES_PER_DEVICE, "off by"]
    rows = [
        [m.flops / 1e12, m.seconds_per_operator * 1e6, m.network / 1e9, m.shared, *samples.values(), f"{deviation:.1%}"]
        for deviation, samples, m in found[:10]
    ]
    print(table(header, rows))


if __name__ == "__main__":
    main()
