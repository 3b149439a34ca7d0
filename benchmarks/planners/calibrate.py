"""Chooses the machine that the GraphPipe paper leaves open, by its throughputs of PipeDream.

    python -m benchmarks.planners.calibrate [--machines 4]

One machine for all cells (a model on a number of devices), and a mini-batch for each cell: the paper has a table of
these, which is an image. Its text says that they grow with the devices, that they are close to the memory limit, and
that mmt has 128 samples on 8 devices. So they are powers of two, and twice the devices have the same mini-batch or one
twice as large, as their memory is only doubled. Of all such mini-batches the ones with throughputs nearest to the
published ones, to 1 %, are chosen; of equal ones the largest, which is closest to the limit.

Machines are sorted by the root mean square of the logarithms of PipeDream's throughput over the paper's, over all
cells. GraphPipe's throughputs are not used. mmt is planned by layers here, which is quicker. The first machine takes
about a quarter of an hour, four take half an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import islice, product
from math import exp, inf, log
from typing import Final

from benchmarks.planners.common import Hardware, run, table
from benchmarks.planners.paper import LAYERS, NUM_DEVICES, THROUGHPUT
from benchmarks.workloads import graph

FLOPS: Final = (15e12, 20e12, 30e12, 40e12, 50e12)
"""FLOP/s: up to the peak of float32 arithmetic, 15.7e12, and beyond, as with tensor cores."""

SECONDS_PER_OPERATOR: Final = (10e-6, 20e-6, 40e-6)

NETWORK: Final = tuple(
    (total / sharers, shared)
    for shared, sharers in (("node", 1), ("device", 4))
    for total in (3.125e9, 6.25e9, 12.5e9, 25e9)
)
"""Bytes per second, and who shares them: from a quarter of an EDR port per node to two ports, as on Summit."""

STATED: Final = {(8, "mmt"): 128}

SMALLEST: Final = {"mmt": (16, 32, 64, 128), "dlrm": (128, 256, 512, 1024, 2048, 4096)}
"""Mini-batches on 4 devices; candle_uno has dlrm's. Twice the largest is hardly any faster."""

EQUAL: Final = 0.01
"""Throughputs whose logarithms differ by at most this much count as equal."""

FARTHEST: Final = len(THROUGHPUT) * len(NUM_DEVICES) * log(1.15) ** 2
"""Sum of squares of a machine that is 15 % off; machines farther off are left out."""

Path = tuple[float, tuple[int, ...]]
"""Sum of squared logarithms, and the mini-batches of a model on the first numbers of devices."""


@dataclass(order=True, slots=True)
class Fit:
    """A machine, and the best paths of each model to every mini-batch on the last number of devices visited.

    `squares`: sum over the best paths of all models.
    """

    squares: float
    machine: Hardware = field(compare=False)
    paths: Mapping[str, tuple[Path, ...]] = field(compare=False, default_factory=dict)

    @property
    def deviation(self) -> float:
        return exp((self.squares / len(THROUGHPUT) / len(NUM_DEVICES)) ** 0.5) - 1

    @property
    def batch_sizes(self) -> dict[str, tuple[int, ...]]:
        return {model: best(paths)[1] for model, paths in self.paths.items()}

    @property
    def next_cell(self) -> tuple[int, str] | None:
        """The number of devices and the model of the next cell; quick cells come first."""
        lengths = {model: len(best(self.paths[model])[1]) if model in self.paths else 0 for model in THROUGHPUT}
        least = min(lengths.values())
        if least == len(NUM_DEVICES):
            return None
        return NUM_DEVICES[least], next(model for model, length in lengths.items() if length == least)


def best(paths: tuple[Path, ...]) -> Path:
    """The nearest path; of equal ones that with the largest mini-batches."""
    return min(paths, key=lambda path: (path[0], [-size for size in path[1]]))


def machines() -> Iterator[Hardware]:
    for flops, seconds, (network, shared), in_place in product(FLOPS, SECONDS_PER_OPERATOR, NETWORK, (False, True)):
        yield Hardware(flops=flops, seconds_per_operator=seconds, network=network, shared=shared, in_place=in_place)


def best_machines() -> Iterator[Fit]:
    """All machines, the best first: the search continues with the one that is nearest so far."""
    fits = [Fit(0.0, machine) for machine in machines()]
    heapify(fits)
    while fits:
        fit = heappop(fits)
        if (cell := fit.next_cell) is None:
            yield fit
        elif (further := _with_cell(fit, *cell)).squares <= FARTHEST:
            heappush(fits, further)


def _with_cell(fit: Fit, number: int, model: str) -> Fit:
    paths = {**fit.paths, model: extended(alike(fit.machine, number), model, number, fit.paths.get(model, ()))}
    return Fit(sum(best(entries)[0] if entries else inf for entries in paths.values()), fit.machine, paths)


def extended(machine: Hardware, model: str, number: int, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """The best path to every mini-batch on this number of devices, unless it is too far off."""
    found: dict[int, list[Path]] = {}
    for squares, sizes in paths or ((0.0, ()),):
        for size in choices(model, number, sizes):
            off = round(deviation(machine, model, number, size) / EQUAL) * EQUAL
            found.setdefault(size, []).append((squares + off**2, (*sizes, size)))
    nearest = [best(tuple(entries)) for entries in found.values()]
    return tuple(path for path in nearest if path[0] <= FARTHEST)


def choices(model: str, number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Mini-batches that may follow those on fewer devices."""
    following = (sizes[-1], 2 * sizes[-1]) if sizes else SMALLEST.get(model, SMALLEST["dlrm"])
    return tuple(size for size in following if size == STATED.get((number, model), size))


def alike(machine: Hardware, num_devices: int) -> Hardware:
    """The machine without its network on a single node, where machines that differ only in it are the same."""
    return replace(machine, network=NETWORK[0][0], shared=NETWORK[0][1]) if num_devices <= 4 else machine


@cache
def deviation(machine: Hardware, model: str, num_devices: int, batch_size: int) -> float:
    """The logarithm of PipeDream's throughput over the published one."""
    problem = machine.problem(graph(model), num_devices, batch_size, LAYERS.get(model, inf))
    ours = run("pipedream", problem).samples_per_second
    return log(ours / THROUGHPUT[model]["pipedream"][NUM_DEVICES.index(num_devices)]) if ours else 1e3


def row(fit: Fit) -> list[object]:
    machine = fit.machine
    return [
        machine.flops / 1e12,
        machine.seconds_per_operator * 1e6,
        machine.network / 1e9,
        machine.shared,
        "in place" if machine.in_place else "sent",
        *(" ".join(map(str, sizes)) for sizes in fit.batch_sizes.values()),
        f"{fit.deviation:.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=4, help="to list")
    options = parser.parse_args()
    header = ["TFLOP/s", "us per operator", "GB/s between nodes", "shared by", "samples", *THROUGHPUT, "off by"]
    print(table(header, [row(fit) for fit in islice(best_machines(), options.machines)]))


if __name__ == "__main__":
    main()
