"""Seconds of searches of `auto`, and how far their plans are from the lower bound, on all workloads.

python -m benchmarks.planners.search_time [auto large] [--seconds 10]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.planners.common import table, verdict
from benchmarks.workloads import WORKLOADS, graph
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.planning import Prediction, Request, best_plan

CLUSTERS: Final[dict[str, tuple[str, int, tuple[int, ...]]]] = {
    "mmt": ("summit", 8, (4096,)),
    "mmt2": ("summit", 4, (2048,)),
    "dlrm": ("summit", 4, (65536, 262144, 1048576)),
    "candle_uno": ("summit", 4, (32768, 131072, 262144)),
    "candle_uno_2": ("summit", 2, (16384, 65536)),
    "candle_uno_4": ("summit", 2, (16384, 65536)),
    "candle_uno_8": ("summit", 4, (32768, 131072, 262144)),
    "candle_uno_16": ("summit", 4, (32768, 131072, 524288)),
    "case_study": ("summit", 2, (1024,)),
    "vision_audio_language": ("dgx_h100", 4, (1024, 4096)),
    "encoder_decoder": ("dgx_a100", 2, (1024,)),
    "mixture_of_experts": ("dgx_a100", 2, (1024,)),
    "unet": ("dgx_a100", 1, (64,)),
}
"""The cluster, nodes and mini-batches of every workload: 8 to 128 images or sequences per device, 2,048 to 65,536 rows
of features. The smaller they are, the more of a step is warm-up and reduction of gradients, and the looser the bound.
"""


def auto(seconds: float) -> Iterator[str]:
    """All workloads on clusters that suit them."""
    rows, gaps = [], {}
    for model in WORKLOADS:
        cluster, num_nodes, sizes = CLUSTERS[model]
        for batch_size in sizes:
            request = Request(
                cluster=preset_cluster(cluster, num_nodes=num_nodes),
                batch_size=batch_size,
                idle_devices=False,
                seconds=seconds,
            )
            prediction = best_plan("auto", graph(model), request)
            gaps[model] = _search_gap(prediction)
            rows.append([model, f"{num_nodes} x {cluster}", batch_size, *_figures(prediction)])
    yield table(["model", "nodes", "mini-batch", *FIGURES], rows)
    num = sum(gap < 0.05 for gap in gaps.values())
    yield f"\nGap of the search below 5 %, largest mini-batches: {num} of {len(gaps)}: {verdict(num == len(gaps))}."


FIGURES: Final = ("pipelines, stages", "search", "step", "gap of the search", "gap of the program")


def _search_gap(prediction: Prediction) -> float:
    return prediction.search.objective / prediction.lower_bound - 1


def _figures(prediction: Prediction) -> list[str]:
    """The columns `FIGURES`. The bound ignores messages, so the program's gap includes their time."""
    gap = prediction.seconds / prediction.lower_bound - 1
    size = f"{prediction.num_pipelines}, {len(prediction.plan.stages)}"
    return [
        size,
        f"{prediction.search.seconds:.1f} s",
        f"{prediction.seconds * 1e3:.4g} ms",
        f"{_search_gap(prediction):.1%}",
        f"{gap:.1%}",
    ]


def large(seconds: float) -> Iterator[str]:
    """About 2,500 operators on 1,024 devices; memory is the peak of this process, torch included."""
    model, batch_size = "vision_audio_language", 8192
    num_operators = len(list(graph(model)))
    cluster = preset_cluster("dgx_h100", num_nodes=128)
    request = Request(cluster=cluster, batch_size=batch_size, idle_devices=False, seconds=seconds)
    began = time.perf_counter()
    prediction = best_plan("auto", graph(model), request)
    total, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = [model, num_operators, request.cluster.num_devices, batch_size, *_figures(prediction), f"{total:.1f} s"]
    header = ["model", "operators", "devices", "mini-batch", *FIGURES, "search and simulation", "peak memory"]
    yield table(header, [[*row, f"{peak / 1e9:.2f} GB"]])
    yield f"\nSearch below 60 s and 4 GB: {verdict(prediction.search.seconds < 60 and peak < 4e9)}."


SECTIONS: Final[dict[str, Callable[[float], Iterator[str]]]] = {"auto": auto, "large": large}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help="all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search of auto")
    arguments = parser.parse_args()
    for name in arguments.sections:
        print(f"\n### {name}\n", *SECTIONS[name](arguments.seconds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
