"""Figures of a search and runners-up; stages by hand in the stage graph; the progress bar."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from lightning_gpp.cluster import preset_cluster
from lightning_gpp.planning import Prediction, Request, best_plan, manual
from lightning_gpp.reports import (
    graph_svg,
    graph_text,
    search_progress,
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
    assert len(plan.alternatives) > 1
    assert all(entry.reason in text for entry in plan.alternatives)
    search = replace(plan.search, notes=("Mind the gap.",))
    unknown = search_text(replace(plan, lower_bound=0.0, alternatives=(), search=search))
    assert "none is known" in unknown
    assert unknown.endswith("Mind the gap.")
    assert search_text(replace(plan, search=None)) == ""


def test_the_stage_graph_tells_replicas_and_recomputation() -> None:
    assert "image_tower (device 1-3,5, 4 replicas, recomputed)" in graph_text(TOWERS)
    assert "device 1-3,5, 4 replicas, recomputed" in graph_svg(TOWERS)


def test_a_bar_tells_how_far_a_search_is() -> None:
    output = io.StringIO()
    with search_progress(Console(file=output, force_terminal=True, width=100)) as show:
        assert show is not None
        show(0.1, float("inf"), 0.0)
        show(0.5, 0.002, 0.001)
    assert "Searching for a plan" in output.getvalue()
    assert "step 2 ms, at best 1 ms" in output.getvalue()


def test_no_bar_where_no_terminal_would_show_it() -> None:
    with search_progress(Console(file=io.StringIO())) as bar:
        assert bar is None
