"""The search of `piper` with its release's costs: against what the release answers, and against a judge of plans."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from benchmarks.planners.released_piper import (
    Case,
    Profile,
    as_released,
    estimated,
    objective,
    optimum,
    question,
    searched,
    simulated,
)
from tests.benchmarks.piper_profiles import towers, transformer

CHAIN, BRANCHES = transformer(16), towers(3, 5)

RELEASED = [
    (CHAIN, 8, 80, 0.0619479217),
    (CHAIN, 8, 8, 0.0718235595),
    (CHAIN, 8, 6, 0.0769857448),
    (CHAIN, 12, 4, 0.0572245149),
    (CHAIN, 16, 3, 0.0419470409),
    (CHAIN, 24, 3, 0.028001326),
    (BRANCHES, 8, 80, 0.061752043),
    (BRANCHES, 8, 8, 0.0719059425),
    (BRANCHES, 8, 6, 0.0770059425),
    (BRANCHES, 12, 4, 0.0566284685),
    (BRANCHES, 16, 3, 0.0419470409),
    (BRANCHES, 24, 3, 0.028001326),
]
"""Profiles, devices, GiB of each, and the seconds per micro-batch that the release finds (commit d7fc8cf)."""


@pytest.mark.parametrize(("content", "devices", "gibibytes", "released"), RELEASED)
def test_the_optimum_is_that_of_the_release(
    content: dict[str, Any], devices: int, gibibytes: float, released: float
) -> None:
    profile = Profile.of(content, Case("", devices, gibibytes))
    seconds, stages = optimum(profile, devices)
    assert seconds == pytest.approx(released, rel=1e-6)
    plan = [(frozenset(stage.units), stage.replicas) for stage in stages]
    assert objective(profile, plan) == pytest.approx(seconds)


def test_no_plan_fits_where_the_release_finds_none() -> None:
    profile = Profile.of(CHAIN, Case("", 8, 1))
    assert optimum(profile, 8) == (inf, [])
    assert objective(profile, [(frozenset(range(18)), 8)]) == inf


def fastest_by_integer_program(profile: Profile, num_stages: int) -> float:
    """Seconds of the slowest stage if each has one device, by HiGHS: layers to stages, in the order of the graph.

    Variables: whether a stage has a layer, whether an edge crosses its border, and the seconds of the slowest.
    """
    layers, edges, stages = len(profile.names), profile.carried, range(num_stages)
    slowest = num_stages * (layers + len(edges))
    rows: list[dict[int, float]] = []
    limits: list[tuple[float, float]] = []

    def has(layer: int, stage: int) -> int:
        return layer * num_stages + stage

    for layer in range(layers):
        rows.append({has(layer, stage): 1.0 for stage in stages})
        limits.append((1, 1))
    for number, edge in enumerate(edges):
        rows.append({has(edge.dst, stage): float(stage) for stage in stages})
        rows[-1].update({has(edge.src, stage): -float(stage) for stage in stages})
        limits.append((0, inf))
        for stage in stages:
            crosses = num_stages * layers + number * num_stages + stage
            for sign in (1.0, -1.0):
                rows.append({crosses: 1.0, has(edge.src, stage): sign, has(edge.dst, stage): -sign})
                limits.append((0, inf))
    for stage in stages:
        row = {has(layer, stage): -float(profile.layers.seconds[0, layer]) for layer in range(layers)}
        for number, edge in enumerate(edges):
            sent = 2 * edge.per_sample / profile.layers.bytes_per_second
            row[num_stages * layers + number * num_stages + stage] = -sent
        rows.append({**row, slowest: 1.0})
        limits.append((0, inf))
    entries = [(index, column, value) for index, row in enumerate(rows) for column, value in row.items()]
    at, columns, values = (np.array(column) for column in zip(*entries, strict=True))
    matrix = csr_array((values, (at, columns)), shape=(len(rows), slowest + 1))
    least, most = (np.array(column) for column in zip(*limits, strict=True))
    cost, upper, integrality = np.zeros(slowest + 1), np.ones(slowest + 1), np.ones(slowest + 1)
    cost[slowest], upper[slowest], integrality[slowest] = 1, inf, 0
    found = milp(
        cost, constraints=LinearConstraint(matrix, least, most), bounds=Bounds(0, upper), integrality=integrality
    )
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_that_of_an_integer_program(seed: int) -> None:
    """479 micro-batches cannot be shared by replicas, so every stage has one device."""
    random = Random(seed)
    content = towers(2, 2) if seed % 2 else transformer(4)
    for node in content["nodes"]:
        seconds = random.uniform(0.01, 0.1)
        node["TMPCs"]["1"] = [{**mode, "timePerSample": seconds} for mode in node["TMPCs"]["1"]]
    for edge in content["edges"]:
        edge["communicationCost"] = random.uniform(0, 1e9)
    profile, number = Profile.of(content, Case("", 3, 80, 479)), random.choice((2, 3))
    assert optimum(profile, number)[0] == pytest.approx(fastest_by_integer_program(profile, number), rel=1e-6)


@pytest.mark.parametrize(("content", "devices"), [(CHAIN, 4), (CHAIN, 12), (BRANCHES, 8), (BRANCHES, 12)])
def test_with_its_objective_the_search_of_auto_is_not_behind(
    content: dict[str, Any], devices: int, tmp_path: Path
) -> None:
    path, case = tmp_path / "profile.json", Case("", devices, 80)
    path.write_text(json.dumps(content))
    profile = Profile.of(content, case)
    asked = as_released(*question(path, profile, case, 2.0))
    seconds, stages = optimum(profile, devices)
    assert estimated(*asked, profile, stages) == pytest.approx(seconds)
    assert searched(*asked, profile)[0] <= seconds * (1 + 1e-6)


def test_steps_are_near_the_objective(tmp_path: Path) -> None:
    path, case = tmp_path / "chain.json", Case("", 4, 80)
    path.write_text(json.dumps(CHAIN))
    profile = Profile.of(CHAIN, case)
    graph, request = question(path, profile, case, 2.0)
    seconds, stages = optimum(profile, 4)
    step = simulated(graph, request)
    assert step == pytest.approx(seconds, rel=0.1)
    assert step <= estimated(graph, request, profile, stages) * (1 + request.simplicity) < inf
