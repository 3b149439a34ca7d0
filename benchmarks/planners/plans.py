"""Many requests for plans, for comparisons between two versions of the planner, or with a part of it switched off.

The requests are the three examples on clusters of CPUs and GPUs, the GraphPipe paper's workloads on its machine, and
200 random ones, with schedules of all layouts. Searches are limited by evaluations instead of seconds, so a version
finds the same plans on every machine. Requests without a plan have no step time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from random import Random
from typing import Final

from benchmarks.examples_by_name import EXAMPLES, model_and_batch
from benchmarks.planners.common import without_data
from benchmarks.planners.paper import BATCH_SIZES, HARDWARE, NUM_DEVICES
from benchmarks.workloads import graph
from lightning_gpp.capture import capture_step
from lightning_gpp.cluster import Cluster, Device, Link, preset_cluster
from lightning_gpp.costs.model import Footprint, Roofline
from lightning_gpp.errors import GPPError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import Request, best_plan
from lightning_gpp.schedules import schedule_names
from tests.planning.graphs import Builder

Case = tuple[str, OperatorGraph, Request]
"""The partitioner, the model and the request."""

NUM_RANDOM: Final = 200
SECONDS: Final = 600.0
"""Time limit of each search, which none reaches: it ends after `EVALUATIONS`."""

EVALUATIONS: Final = 6_000
"""Limit of the evaluations of all searches for a request."""

SCHEDULES: Final = ("1f1b", "gpipe", "zero_bubble", "interleaved", "zbv", "chimera")
"""One or two of every layout."""


def examples() -> Iterator[tuple[str, Case]]:
    """The examples with the default partitioner and every schedule on four GPUs, and on the example's own machine."""
    for name in EXAMPLES:
        module, batch = model_and_batch(name)
        captured = capture_step(module, batch)
        for schedule in (*SCHEDULES, "auto"):
            for max_replicas in (1, None):
                request = Request(
                    cluster=preset_cluster("pcie_a100").subset(range(4)),
                    batch_size=captured.batch_size,
                    schedules=schedule_names() if schedule == "auto" else (schedule,),
                    max_replicas=max_replicas if schedule in ("1f1b", "gpipe", "zero_bubble") else None,
                    idle_devices=False,
                    seconds=SECONDS,
                )
                yield f"{name} {schedule} {request.max_replicas}", ("auto", captured.graph, request)


def paper() -> Iterator[tuple[str, Case]]:
    """The requests of figure 6, and two schedules that need another layout on the smallest machine."""
    for model, batch_sizes in BATCH_SIZES.items():
        for num_devices, batch_size in zip(NUM_DEVICES, batch_sizes, strict=True):
            others = (("auto", "interleaved"), ("auto", "chimera"), ("auto", "zero_bubble")) if num_devices == 4 else ()
            for name, schedule in (("auto", "1f1b"), ("graphpipe", "1f1b"), ("pipedream", "1f1b"), *others):
                request = Request(
                    cluster=HARDWARE.cluster(num_devices),
                    batch_size=batch_size,
                    schedules=(schedule,),
                    costs=Roofline(graph(model)),
                    footprint=Footprint(optimizer="sgd"),
                    recompute=False,
                    idle_devices=False,
                    seconds=SECONDS,
                )
                yield f"{model} {num_devices} {name} {schedule}", (name, without_data(graph(model)), request)


def random_requests(number: int = NUM_RANDOM) -> Iterator[tuple[str, Case]]:
    for seed in range(number):
        yield f"random {seed}", random_case(Random(seed))


def random_case(random: Random) -> Case:
    """A random request: three to eight modules that form any DAG, on two to four devices, some with little memory.

    Devices have room for the mini-batch beside their memory: the recorded step times are older than its bytes.
    """
    model = random_graph(random)
    memory = random.choice((1e9, 1e9, 3e5))
    link = Link(latency=random.choice((0.0, 1e-5)), bytes_per_second=random.choice((1e7, 1e8, 1e10)))
    schedule = random.choice((*SCHEDULES, "1f1b", "auto"))
    num_devices, batch_size = random.choice((2, 3, 4)), random.choice((8, 12, 24))
    memory += model.input_bytes.at(batch_size)
    device = Device(name="slow", memory_bytes=memory, peak_flops={"float32": 1e10}, peak_bytes_per_second=1e11)
    request = Request(
        cluster=Cluster.uniform(device, num_devices, link),
        batch_size=batch_size,
        schedules=("1f1b", "gpipe", "zero_bubble") if schedule == "auto" else (schedule,),
        recompute=random.choice((False, False, None)),
        max_replicas=None if schedule in ("interleaved", "zbv", "chimera") else random.choice((None, None, 1)),
        idle_devices=False,
        seconds=SECONDS,
    )
    return "auto", model, request


def random_graph(random: Random) -> OperatorGraph:
    build = Builder()
    outputs, unread = [build.data()], set[str]()
    for index in range(random.randint(3, 8)):
        read = random.sample(outputs, k=min(len(outputs), random.choice((1, 1, 1, 2))))
        work, width = random.uniform(0.2, 3.0), random.choice((16, 64))
        outputs.append(build.linear(f"layers.{index}", *read, work=work, width=width))
        unread = unread.difference(read) | {outputs[-1]}
    return build.step(build.linear("head", *sorted(unread), work=0.2))


def step_seconds(case: Case) -> float | None:
    """The simulated step of the best plan; None if there is none."""
    name, model, request = case
    try:
        return best_plan(name, model, request).seconds
    except GPPError:
        return None


GROUPS: Final[dict[str, Callable[[], Iterator[tuple[str, Case]]]]] = {
    "examples": examples,
    "paper": paper,
    "random": random_requests,
}


def ratio(before: float | None, now: float | None) -> float:
    """The ratio of two step times; no plan counts as an infinite one."""
    if before is None or now is None:
        return 1.0 if before is now else (0.0 if before is None else inf)
    return now / before
