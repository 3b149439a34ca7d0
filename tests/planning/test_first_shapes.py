"""First drafts of the search: pipelines with equal replicas, scarce memory, forwards that fill waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.planning import Draft, DraftStage, Evaluator, Problem, Request
from lightning_gpp.planning.partitioners.auto.moves import spread
from lightning_gpp.planning.partitioners.auto.seeds import Cuts, furthest, seeds, variants
from lightning_gpp.planning.problem.draft import copies
from tests.planning import graphs
from tests.planning.graphs import Builder
from tests.planning.problems import DEVICE
from tests.planning.test_recomputation import problem_of as problem_with_layers

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
    drafts = [draft for cuts in islice(ways, 6) for draft in seeds(problem, cuts, lambda seconds: True)]
    first = [evaluate(spread(draft)) for draft in drafts]
    assert min(found.rank for found in first) <= min(found.rank for found in drawn)


def test_where_memory_is_scarce_stages_leave_time_for_what_they_recompute() -> None:
    """Stages ahead, with more micro-batches in flight, get fewer of 48 equal layers; others recompute all or none."""
    build = Builder()
    x = build.data(width=16)
    for index in range(48):
        wide = build.linear(f"layers.{index}.up", x, width=128, work=1)
        x = build.linear(f"layers.{index}.down", wide, width=16, work=0.3)
    graph = replace(build.step(build.linear("head", x, width=16, work=0.1)), uncalled=frozenset({"layers"}))
    ample = replace(problem_with_layers(graph, 8, 1e12), batch_size=6400, sizes=(400,))
    memory = float(ample.static_bytes.sum() / 8 + 0.5 * ample.saved_bytes(400).sum())
    problem = replace(ample, cluster=Cluster.uniform(replace(DEVICE, memory_bytes=memory), 8, LINK))
    evaluate, order = Evaluator(problem), [*range(problem.num_units)]
    cuts = Cuts(order=order, size=400, stages=8)
    others = [replace(cuts, recompute=again, fitting=fits) for again in (False, True) for fits in (False, True)]
    ((found,), *rest) = (
        [evaluate(draft) for draft in seeds(problem, entry, lambda seconds: True)]
        for entry in (replace(cuts, partly=True), *others)
    )
    assert found.fits
    assert any(found.recompute)
    assert found.rank < min(entry.rank for drafts in rest for entry in drafts)
    assert replace(cuts, partly=True) in [*variants(problem, [order])]
    assert not any(entry.partly for entry in variants(ample, [order]))


def test_the_last_end_within_the_limit_may_be_behind_ends_that_are_not() -> None:
    """A border after the first unit is dear; one after the second is not."""
    row = np.array([0.0, 1.0, 2.0, 9.0])
    messages = np.zeros((4, 4))
    messages[0, 1] = messages[1, 2] = 50
    assert furthest(row, messages, row + 3).tolist() == [2, 1, 2, 3]
