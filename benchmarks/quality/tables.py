"""The tables of the sweep, as Markdown, and their place in a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.planners.common import table
from benchmarks.quality.sweep import METHODS, SEEDS, STAGES, methods_of, pipelines_of, runs
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Outcome, Run, pipeline_of
from lightning_gpp.schedules.continuous import delays_of

BEGIN, END = "<!-- tables of python -m benchmarks.quality -->", "<!-- end of the tables -->"

Setting = tuple[str, str]
"""Task and optimizer."""


@dataclass(frozen=True, slots=True)
class Losses:
    """The final losses of all runs."""

    outcomes: Mapping[Run, Outcome]

    def seeds(self, setting: Setting) -> list[int]:
        """Those of which all runs are done."""
        missing = {run.seed for run in runs() if (run.task, run.optimizer) == setting and run not in self.outcomes}
        return [seed for seed in SEEDS if seed not in missing]

    def at(self, setting: Setting, method: str, pipeline: tuple[int, bool], rate: float) -> list[float]:
        """The validation losses of all seeds at a rate."""
        (task, optimizer), (num_stages, chain) = setting, pipeline
        what = {"task": task, "optimizer": optimizer, "method": method, "num_stages": num_stages, "chain": chain}
        return [self.outcomes[Run(**what, rate=rate, seed=seed)].validation for seed in self.seeds(setting)]

    def best_rate(self, setting: Setting, method: str, pipeline: tuple[int, bool]) -> float:
        """The rate with the smallest mean over the seeds."""
        return min(rates_of(setting), key=lambda rate: fmean(self.at(setting, method, pipeline, rate)))

    def best(self, setting: Setting, method: str, pipeline: tuple[int, bool]) -> list[float]:
        return self.at(setting, method, pipeline, self.best_rate(setting, method, pipeline))


def rates_of(setting: Setting) -> Sequence[float]:
    return TASKS[setting[0]].rates[setting[1]]


def settings(losses: Losses) -> list[Setting]:
    """Those with all runs of at least one seed."""
    every = [(name, optimizer) for name, task in TASKS.items() for optimizer in task.rates]
    return [setting for setting in every if losses.seeds(setting)]


def late_methods(task: str) -> list[str]:
    """Methods whose delays depend on the pipeline."""
    return [method for method in METHODS if pipelines_of(task, method)[0][0] in STAGES]


def pipeline_for(task: str, method: str, num_stages: int, chain: bool = True) -> tuple[int, bool]:
    """The pipeline whose run stands for that of a method in this one."""
    return (num_stages, chain) if method in late_methods(task) else pipelines_of(task, method)[0]


def pages(outcomes: Mapping[Run, Outcome]) -> str:
    """All tables."""
    losses = Losses(outcomes)
    parts = [
        ("Delays", "Updates between a forward and its backward, stage by stage, from the programs.", delays()),
        ("Best rate of each method", f"{BEST} {seeds_of(losses)}", best_of_sweep(losses)),
        *((f"All rates: {name_of(setting)}", ALL, all_rates(losses, setting)) for setting in settings(losses)),
        ("The graph against the chain of the same stages", GRAPH, graph_against_chain(losses)),
    ]
    return "\n\n".join(f"### {title}\n\n{text}\n\n{content}" for title, text, content in parts)


BEST = "Mean of the final validation losses of the seeds, their standard deviation, and in brackets the rate."
ALL = (
    "The same at every rate: a column compares methods at a fixed rate. First the chain of 8 stages, then that of 12; "
    "`sync` and `2BW`, also with `EF`, are the same in both."
)
GRAPH = (
    "Each at its own best rate, and the number of pairs of runs (all rates, all seeds) in which the graph ends with "
    "the smaller loss."
)


def name_of(setting: Setting) -> str:
    return f"{setting[0]}, {setting[1]}"


def seeds_of(losses: Losses) -> str:
    return "Seeds: " + "; ".join(f"{name_of(s)}: {len(losses.seeds(s))}" for s in settings(losses)) + "."


def mean(losses: Sequence[float]) -> str:
    if not isfinite(sum(losses)):
        return "diverges"
    return f"{fmean(losses):.3f}" + (f" ± {stdev(losses):.3f}" if len(losses) > 1 else "")


def delays() -> str:
    pipelines = [(task, number, chain) for task in TASKS for number, chain in pipelines_of(task, "latest")]
    return table(
        ["model", "stages", "", "delays"], [[*_named(*pipeline), _delays(*pipeline)] for pipeline in pipelines]
    )


def _named(task: str, num_stages: int, chain: bool) -> list[object]:
    return [task, num_stages, "chain" if chain else "graph"]


def _delays(task: str, num_stages: int, chain: bool) -> str:
    return " ".join(map(str, delays_of(pipeline_of(task, num_stages, chain)).values()))


def best_of_sweep(losses: Losses) -> str:
    columns = list(product(settings(losses), STAGES))
    header = ["", *(f"{name_of(setting)}, {number} stages" for setting, number in columns)]
    return table(header, [[method, *(_best(losses, method, *column) for column in columns)] for method in METHODS])


def _best(losses: Losses, method: str, setting: Setting, num_stages: int) -> str:
    if method not in methods_of(setting[1]):
        return "–"
    pipeline = pipeline_for(setting[0], method, num_stages)
    return f"{mean(losses.best(setting, method, pipeline))} ({losses.best_rate(setting, method, pipeline):g})"


def all_rates(losses: Losses, setting: Setting) -> str:
    rates = rates_of(setting)
    columns = list(product(STAGES, rates))
    rows = [
        [method, *(mean(losses.at(setting, method, pipeline_for(setting[0], method, n), rate)) for n, rate in columns)]
        for method in methods_of(setting[1])
    ]
    return table(["", *(f"{number} stages, {rate:g}" for number, rate in columns)], rows)


def graph_against_chain(losses: Losses) -> str:
    header = ["", "stages", "", "chain", "graph", "graph - chain", "graph is better"]
    return table(header, list(_graph_rows(losses)))


def _graph_rows(losses: Losses) -> Iterator[list[object]]:
    for setting, number, method in product(settings(losses), STAGES, METHODS):
        if method in methods_of(setting[1]) and (number, False) in pipelines_of(setting[0], method):
            best = [losses.best(setting, method, (number, chain)) for chain in (True, False)]
            difference = f"{fmean(best[1]) - fmean(best[0]):+.3f}"
            yield [
                name_of(setting),
                number,
                method,
                *map(mean, best),
                difference,
                _won(losses, setting, method, number),
            ]


def _won(losses: Losses, setting: Setting, method: str, num_stages: int) -> str:
    """How many pairs of runs end with the smaller loss on the graph."""
    chain, graph = (
        [loss for rate in rates_of(setting) for loss in losses.at(setting, method, (num_stages, chain), rate)]
        for chain in (True, False)
    )
    won = sum(of_graph < of_chain for of_graph, of_chain in zip(graph, chain, strict=True))
    return f"{won} of {len(chain)}"


def write(page: Path, tables: str) -> None:
    """Put the tables between the page's marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")
