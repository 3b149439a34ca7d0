"""First drafts of the search: pipelines with equal replicas."""

from __future__ import annotations

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.planning import Draft, DraftStage, Evaluator, Problem, Request
from lightning_gpp.planning.partitioners.auto.moves import spread
from lightning_gpp.planning.partitioners.auto.seeds import seed, variants
from lightning_gpp.planning.problem.draft import copies
from tests.planning import graphs

LINK = Link(latency=1e-5, bytes_per_second=1e9)


def problem_of(num_layers: int, num_devices: int, memory_bytes: float = 1e9) -> Problem:
    """A chain of equal layers, and two samples for every device."""
    device = Device(name="test", memory_bytes=memory_bytes, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e9)
    cluster = Cluster.uniform(device, num_devices, LINK)
    return Request(cluster=cluster, batch_size=2 * num_devices, simplicity=0.0).problem(graphs.chain(num_layers))


def _equal(problem: Problem, num_stages: int, size: int) -> Draft:
    """Stages of as many units each, in their order."""
    number, replicas = problem.num_units, problem.num_devices // num_stages
    borders = [number * stage // num_stages for stage in range(num_stages + 1)]
    groups = (tuple(range(a, b)) for a, b in zip(borders, borders[1:], strict=False))
    stages = zip(groups, copies(num_stages, replicas), strict=True)
    return Draft(stages=tuple(DraftStage(units=a, devices=b, micro_batch_size=size) for a, b in stages))


def test_the_first_ways_to_cut_are_as_fast_as_equal_pipelines() -> None:
    """The memory takes an eighth of the layers at most."""
    problem = problem_of(64, 128, memory_bytes=64 * 4 * 64 * 64 * 4 / 8)
    evaluate = Evaluator(problem)
    drawn = [
        evaluate(_equal(problem, stages, size))
        for stages in (8, 16, 32)
        for size in problem.sizes
        if size % (128 // stages) == 0
    ]
    ways = variants(problem, [list(range(problem.num_units))])
    first = [evaluate(spread(seed(problem, cuts))) for cuts in ways[:6]]
    assert min(found.rank for found in first) <= min(found.rank for found in drawn)
