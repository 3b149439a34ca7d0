"""Small random planning problems: any DAG, with memory limits and clusters of one or two nodes."""

from __future__ import annotations

from random import Random

import numpy as np

from lightning_gpp.cluster import Cluster, Device, Link, Node
from lightning_gpp.costs.model import Footprint, Seconds
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.planning import Problem
from lightning_gpp.planning.problem.units import Unit, UnitGraph, Value

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e9)


class Given:
    """Costs of units that have one operator each: seconds per micro-batch, affine in its samples."""

    name = "given"

    def __init__(self, forward: dict[str, Affine], ratio: float = 2.0) -> None:
        self.forward, self.ratio = forward, ratio

    def seconds(self, operator: Operator, num_samples: int, device: Device) -> Seconds:
        forward = self.forward[operator.name].at(num_samples) * 1e9 / device.peak_flops["float32"]
        return Seconds(forward, self.ratio / 2 * forward, self.ratio / 2 * forward)


def random_problem(seed: int, num_units: int | None = None, num_devices: int | None = None) -> Problem:
    """A random DAG with one sink, the last unit."""
    random = Random(seed)
    units = num_units or random.randint(3, 6)
    devices = num_devices or random.randint(2, 4)
    readers: list[set[int]] = [set() for _ in range(units)]
    for dst in range(1, units):
        for src in random.sample(range(dst), k=min(dst, random.choice((0, 1, 1, 2)))):
            readers[src].add(dst)
    values = [(src, tuple(sorted(dsts or {units - 1}))) for src, dsts in enumerate(readers[:-1])]
    return problem_of(random, units, values, cluster_of(random, devices))


def cluster_of(random: Random, num_devices: int) -> Cluster:
    inside = Link(latency=1e-3, bytes_per_second=random.choice((1e2, 1e3)))
    if num_devices == 4 and random.random() < 0.3:
        node = Node(device=DEVICE, count=2, link=inside)
        return Cluster.of_nodes("two nodes", [node, node], Link(latency=5e-3, bytes_per_second=50))
    return Cluster.uniform(DEVICE, num_devices, inside)


def problem_of(random: Random, num_units: int, values: list[tuple[int, tuple[int, ...]]], cluster: Cluster) -> Problem:
    graph, forward = OperatorGraph(), {}
    for index in range(num_units):
        graph.add(Operator(name=f"op{index}", target="call"))
        forward[f"op{index}"] = Affine(random.uniform(0.05, 1.0), random.choice((0.0, 0.1, 0.5)))
    units = tuple(
        Unit(
            modules=(f"m{index}",),
            operators=(f"op{index}",),
            saved_bytes=Affine(random.uniform(1, 10)),
            parameter_bytes=random.randint(0, 100),
        )
        for index in range(num_units)
    )
    flows = tuple(Value(src=src, dsts=dsts, bytes=Affine(random.uniform(0, 5))) for src, dsts in values)
    problem = Problem(
        graph=graph,
        costs=Given(forward),
        units=UnitGraph(units=units, values=flows),
        cluster=cluster,
        batch_size=12,
        sizes=random.choice(((1, 2, 4), (2, 3, 6), (1, 3, 12))),
        footprint=Footprint(optimizer="sgd"),
        recompute=random.choice((False, False, None)),
    )
    if random.random() < 0.4:
        problem = _tight(random, problem)
    return problem


def _tight(random: Random, problem: Problem) -> Problem:
    """The same with memory for a part of what one device would need for everything."""
    from dataclasses import replace

    everything = float(problem.static_bytes.sum() + 3 * problem.saved_bytes(problem.sizes[1]).sum())
    memory = random.uniform(0.4, 1.0) * everything
    cluster = problem.cluster
    devices = tuple(replace(device, memory_bytes=memory) for device in cluster.devices)
    return replace(problem, cluster=replace(cluster, devices=devices))


def totals(problem: Problem, size: int) -> np.ndarray:
    return problem.seconds(size).total
