"""Slack: micro-batches in flight for messages that take long, searched for within the memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from benchmarks.planners.common import simulated
from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.planning import Draft, Evaluator, Problem, Request, SearchControl
from lightning_gpp.planning.partitioners.auto.moves import moves, slack_of_chain
from lightning_gpp.planning.partitioners.auto.search import auto
from tests.planning import graphs
from tests.planning.problems import random_problem
from tests.planning.test_moves import random_draft_of

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e9)


def problem_of(**settings: Any) -> Problem:
    """A chain of four equal layers on four devices, whose messages take about as long as a forward."""
    cluster = Cluster.uniform(DEVICE, 4, Link(latency=2e-3, bytes_per_second=1e9))
    options = {"max_replicas": 1, "num_pipelines": 1, "batch_size": 24, "micro_batch_size": 1, **settings}
    return Request(cluster=cluster, simplicity=0.0, **options).problem(graphs.chain(4))


def found(problem: Problem) -> Draft:
    draft = auto(problem, SearchControl(seconds=30.0)).draft
    assert draft is not None
    return draft


def without(draft: Draft) -> Draft:
    return replace(draft, stages=tuple(replace(stage, slack=0) for stage in draft.stages))


def test_late_messages_get_slack_and_the_program_gains_as_much() -> None:
    problem = problem_of()
    draft = found(problem)
    assert any(stage.slack for stage in draft.stages)
    evaluate = Evaluator(problem)
    gain = evaluate(without(draft)).seconds / evaluate(draft).seconds
    programs = simulated(problem, without(draft)).seconds / simulated(problem, draft).seconds
    assert gain > 1.1
    assert programs == pytest.approx(gain, rel=0.02)


def test_a_graph_with_slack_is_never_slower_than_the_chain_of_the_same_stages() -> None:
    """With the warm-up of the chain, all orders are those of the chain, and fewer stages wait for each other."""
    slower = 0
    for seed in range(200):
        problem = random_problem(seed, num_units=6, num_devices=4)
        draft = random_draft_of(problem, Random(seed))
        evaluate = Evaluator(problem)
        chain = evaluate(replace(draft, chained=True)).seconds
        tight = evaluate(draft).seconds
        as_chain = draft.with_stages(slack=slack_of_chain(problem, draft.groups))
        if chain < float("inf"):
            assert min(tight, evaluate(as_chain).seconds) <= chain * (1 + 1e-9), seed
            slower += tight > chain * (1 + 1e-9)
            assert as_chain == draft or as_chain in set(moves(problem, draft, [1.0] * len(draft.groups)))
    assert slower > 0
