"""Random drafts of a problem, and their simulation as programs."""

from __future__ import annotations

from random import Random

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import Draft, DraftStage, Problem, Request
from lightning_gpp.planning.problem.draft import layouts

DEVICE = Device(
    name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e9, seconds_per_operator=1e-4
)
LINKS = (Link(), Link(latency=1e-3, bytes_per_second=1e5), Link(latency=1e-4, bytes_per_second=1e6))


def random_case(graph: OperatorGraph, seed: int, *, replicated: bool) -> tuple[Problem, Draft]:
    """A problem with a random cluster, schedule and micro-batch size, and a draft that cuts an order of the units."""
    random = Random(seed)
    num_devices = random.randint(2, 6) if replicated else random.randint(1, 4)
    request = Request(
        cluster=Cluster.uniform(DEVICE, num_devices, random.choice(LINKS)),
        batch_size=48,
        micro_batch_size=random.choice((12, 24)) if replicated else random.choice((1, 2, 3, 4, 6)),
        schedules=(random.choice(("1f1b", "gpipe")),),
    )
    problem = request.problem(graph)
    num_stages = random.randint(1, num_devices - 1) if replicated else num_devices
    return problem, random_draft(problem, num_stages, random)


def random_draft(problem: Problem, num_stages: int, random: Random) -> Draft:
    borders = sorted(random.sample(range(1, problem.num_units), num_stages - 1))
    groups = [range(*pair) for pair in zip([0, *borders], [*borders, problem.num_units], strict=True)]
    cuts = sorted(random.sample(range(1, problem.num_devices), num_stages - 1))
    replicas = [stop - start for start, stop in zip([0, *cuts], [*cuts, problem.num_devices], strict=True)]
    stages = tuple(
        DraftStage(
            units=tuple(group),
            devices=devices,
            micro_batch_size=problem.sizes[0],
            recompute=problem.num_units - 1 not in group and random.random() < 0.3,
            slack=0 if problem.num_units - 1 in group else random.choice((0, 0, 1, 2)),
        )
        for group, devices in zip(groups, random.choice(layouts(replicas)), strict=True)
    )
    return Draft(stages=stages, schedule=problem.schedules[0], chained=random.random() < 0.2)
