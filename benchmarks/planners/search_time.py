"""Seconds and states of searches: GraphPipe's partitioner compared with those for chains, and `auto` on all workloads.

    python -m benchmarks.planners.search_time [published chains auto large ...] [--seconds 10] [--models mmt2 dlrm ...]

All searches of a model get the same units and micro-batch sizes. Our PipeDream and Piper evaluate their recurrences
with numpy, thousands of transitions at a time, so their seconds are not those of the published programs; the numbers of
transitions are. `chains` therefore times the same recurrences as plain loops, too (`benchmarks.planners.published`).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from benchmarks.planners.common import problem_of, search, table, verdict
from benchmarks.planners.paper import HARDWARE, LAYERS, SAMPLES_PER_DEVICE
from benchmarks.planners.published import pipedream_in_loops, piper_in_loops
from benchmarks.workloads import WORKLOADS, graph
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.planning import Answer, Prediction, Problem, Request, SearchControl, best_plan
from lightning_gpp.planning.problem.partitioner import Partitioner, partitioner_of

NUM_DEVICES: Final = 32
TIMES_FASTER: Final = 21
"""The best ratio that the paper's abstract gives."""

MODELS: Final = (("mmt", inf), ("mmt", LAYERS["mmt"]), ("mmt2", inf), ("mmt2", LAYERS["mmt2"])) + tuple(
    (model, inf) for model in ("dlrm", "candle_uno", "candle_uno_8")
)
"""Models, and pieces that they are cut into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Seconds of each search of `auto`, and the wanted ones of MODELS."""

    seconds: float
    models: tuple[tuple[str, float], ...] = MODELS


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


def published(options: Options) -> Iterator[str]:
    """The paper's table 1 at its largest: 32 devices."""
    names = ("pipedream", "piper", "graphpipe")
    rows, ratios = [], []
    for model, num_pieces in options.models:
        problem = problem_for(model, num_pieces)
        runs = [search(name, problem, inf) for name in names]
        ours, took = runs[-1]
        ratios += [answer.states / ours.states for answer, _ in runs[:-1] if answer.draft]
        times = [_times(answer, elapsed, took) for answer, elapsed in runs[:-1]] + [f"{took:.2f} s"]
        states = [_states(answer, ours) for answer, _ in runs]
        rows.append([model, problem.num_units, *times, *states])
    yield table(["model", "units", *names, *(f"transitions of {name}" for name in names)], rows)
    yield (
        f"\nPublished transitions over graphpipe's states: {min(ratios):.0f} to {max(ratios):.0f}. Goal, "
        f"at least {TIMES_FASTER} in all: {verdict(min(ratios) >= TIMES_FASTER)}."
    )


def chains(options: Options) -> Iterator[str]:
    """CPU time of PipeDream's partitioner, in plain loops and as shipped, and of GraphPipe's, on the same problems."""
    planners = {"loops": pipedream_in_loops, **{name: partitioner_of(name) for name in ("pipedream", "graphpipe")}}
    rows, ratios = [], []
    for model, num_pieces in options.models:
        runs = {name: least(planner, model, num_pieces) for name, planner in planners.items()}
        took, ours = {name: run.seconds for name, run in runs.items()}, runs["graphpipe"]
        ratios.append(took["loops"] / ours.seconds)
        times = [f"{seconds * 1e3:,.0f} ms" for seconds in took.values()]
        shares = [f"{ratios[-1]:.1f}", f"{took['pipedream'] / ours.seconds:.1f}"]
        rows.append([model, ours.num_units, *times, *shares, f"{ours.states:,}"])
    header = ["model", "units", "pipedream in loops", "pipedream", "graphpipe", "times faster than loops"]
    yield table([*header, "times faster than pipedream", "transitions of graphpipe"], rows)
    num = sum(ratio >= TIMES_FASTER for ratio in ratios)
    yield f"\nAt least {TIMES_FASTER} times faster than the loops: {num} of {len(ratios)}."
    if PIPERS in options.models:
        loops, ours, graphpipe = (
            least(name, *PIPERS) for name in (piper_in_loops, partitioner_of("piper"), planners["graphpipe"])
        )
        yield (
            f"\nPiper, {PIPERS[0]} with {loops.num_units} units: loops {loops.seconds:.2f} s, as it ships "
            f"{ours.seconds:.2f} s, {loops.seconds / graphpipe.seconds:.1f} and {ours.seconds / graphpipe.seconds:.1f} "
            "times those of graphpipe. The others have too many transitions for loops."
        )


PIPERS: Final = ("mmt2", LAYERS["mmt2"])
"""The only one of MODELS for which Piper has few enough transitions for plain loops."""

NUM_RUNS: Final = 5


class Spent(NamedTuple):
    """CPU seconds of a search, its states, and units."""

    seconds: float
    states: int
    num_units: int


def least(planner: Partitioner, model: str, num_pieces: float) -> Spent:
    """The quickest of some runs, each on a new problem without cached costs."""
    name = getattr(planner, "__name__", "")
    print(f"{model}, {num_pieces} pieces: {name}", file=sys.stderr, flush=True)
    return min(_spent(planner, model, num_pieces) for _ in range(NUM_RUNS))


def _spent(planner: Partitioner, model: str, num_pieces: float) -> Spent:
    problem = problem_for(model, num_pieces)
    began = time.process_time()
    answer = planner(problem, SearchControl(seconds=inf))
    return Spent(time.process_time() - began, answer.states, problem.num_units)


def problem_for(model: str, num_pieces: float) -> Problem:
    """A new problem, without cached costs, on the paper's machine."""
    batch_size = NUM_DEVICES * SAMPLES_PER_DEVICE[_family(model)]
    return problem_of(model, HARDWARE.cluster(NUM_DEVICES), batch_size, num_pieces)


def _family(model: str) -> str:
    return next(name for name in SAMPLES_PER_DEVICE if model.startswith(name))


def _times(answer: Answer, elapsed: float, ours: float) -> str:
    return f"{elapsed:.2f} s ({elapsed / ours:.1f})" if answer.draft else f"refused after {elapsed:.2f} s"


def _states(answer: Answer, ours: Answer) -> str:
    if answer is ours:
        return f"{answer.states:,}"
    return f"{answer.states:,} ({answer.states / ours.states:.0f})" if answer.draft else "-"


def auto(options: Options) -> Iterator[str]:
    """All workloads on clusters that suit them."""
    rows, gaps = [], {}
    for model in WORKLOADS:
        cluster, num_nodes, sizes = CLUSTERS[model]
        for batch_size in sizes:
            request = Request(
                cluster=preset_cluster(cluster, num_nodes=num_nodes),
                batch_size=batch_size,
                idle_devices=False,
                seconds=options.seconds,
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


def large(options: Options) -> Iterator[str]:
    """About 2,500 operators on 1,024 devices; memory is the peak of this process, torch included."""
    model, batch_size = "vision_audio_language", 8192
    num_operators = len(list(graph(model)))
    cluster = preset_cluster("dgx_h100", num_nodes=128)
    request = Request(cluster=cluster, batch_size=batch_size, idle_devices=False, seconds=options.seconds)
    began = time.perf_counter()
    prediction = best_plan("auto", graph(model), request)
    total, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = [model, num_operators, request.cluster.num_devices, batch_size, *_figures(prediction), f"{total:.1f} s"]
    header = ["model", "operators", "devices", "mini-batch", *FIGURES, "search and simulation", "peak memory"]
    yield table(header, [[*row, f"{peak / 1e9:.2f} GB"]])
    yield f"\nSearch below 60 s and 4 GB: {verdict(prediction.search.seconds < 60 and peak < 4e9)}."


SECTIONS: Final[dict[str, Callable[[Options], Iterator[str]]]] = {
    "published": published,
    "chains": chains,
    "auto": auto,
    "large": large,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help="all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search of auto")
    names = sorted({model for model, _ in MODELS})
    parser.add_argument("--models", nargs="+", default=names, choices=names, help="of published and chains")
    arguments = parser.parse_args()
    models = tuple(entry for entry in MODELS if entry[0] in arguments.models)
    options = Options(seconds=arguments.seconds, models=models)
    for name in arguments.sections:
        print(f"\n### {name}\n", *SECTIONS[name](options), sep="\n", flush=True)


if __name__ == "__main__":
    main()
