"""Figures of a search; stages by hand in the stage graph."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.cluster import preset_cluster
from lightning_gpp.planning import Prediction, Request, best_plan, manual
from lightning_gpp.reports import (
    graph_svg,
    graph_text,
    search_text,
)
from lightning_gpp.reports.units import rate
from tests.planning import graphs

TOWERS = manual(
    graphs.two_towers(num_blocks=1),
    [
        {"modules": ["image_tower"], "devices": [1, 2, 3, 5], "micro_batch_size": 8, "recompute": True},
        {"modules": ["text_tower"], "devices": [4]},
        {"modules": ["head"], "devices": [0]},
    ],
    batch_size=16,
    micro_batch_size=4,
)


def prediction() -> Prediction:
    request = Request(cluster=preset_cluster("summit"), batch_size=64, seconds=5.0)
    return best_plan("auto", graphs.two_towers(), request)


def test_figures_of_a_search() -> None:
    plan = prediction()
    assert plan.search is not None
    text = search_text(plan)
    assert f"{rate(plan.samples_per_second)} samples/s" in text
    assert f"{plan.search.states} states" in text
    assert f"at most {100 * (plan.gap or 0):.1f} % longer than the best possible one" in text
    search = replace(plan.search, notes=("Mind the gap.",))
    unknown = search_text(replace(plan, lower_bound=0.0, search=search))
    assert "none is known" in unknown
    assert unknown.endswith("Mind the gap.")
    assert search_text(replace(plan, search=None)) == ""


def test_the_stage_graph_tells_replicas_and_recomputation() -> None:
    assert "image_tower (device 1-3,5, 4 replicas, recomputed)" in graph_text(TOWERS)
    assert "device 1-3,5, 4 replicas, recomputed" in graph_svg(TOWERS)
