"""The runs of the sweep, and the file of their outcomes, to which every run adds a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path

from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Method, Outcome, Run, train

SEEDS = range(3)
STAGES = (8, 12)
"""1F1B with one micro-batch per mini-batch: a chain of 8 stages has delays of 7 to 0, one of 12 stages 11 to 0."""

EQUALLY_LATE = {"sync": 1, "2BW": 2, "2BW, EF": 2, "PACI": 2}
"""Methods with one delay in every pipeline, and the stages that it takes to show it."""

LATER = ("latest", "stash", "Nesterov", "PipeMare", "PipeMare, T3", "LayerPipe2", "PipeOptim", "SpecTrain", "MSNAG")
METHODS = (*EQUALLY_LATE, *LATER)
WITH_ADAMW = ("Nesterov", "LayerPipe2")
"""Methods that are not tried with SGD: Nesterov's brings a relative of AdamW with it."""
ON_CHAINS = ("LayerPipe2",)
"""Methods that are not tried on graphs."""


def method_of(name: str, num_steps: int) -> Method:
    """PipeMare anneals its rates over a quarter of the run; T3 is an eighth of it."""
    pipemare = {"rescale_steps": num_steps // 4}
    return {
        "sync": Method(policy="latest"),
        "2BW": Method(policy="double_buffer"),
        "2BW, EF": Method(policy="error_feedback"),
        "PACI": Method(policy="latest"),
        "latest": Method(policy="latest"),
        "stash": Method(policy="stash"),
        "Nesterov": Method(policy="stash", optimizer="nadamw"),
        "PipeMare": Method(policy="corrected", options=pipemare),
        "PipeMare, T3": Method(policy="corrected", options=pipemare, synchronous_steps=num_steps // 8),
        "LayerPipe2": Method(policy="corrected", options={"rescale_steps": 0, "discrepancy_decay": "window"}),
        "PipeOptim": Method(policy="predicted"),
        "SpecTrain": Method(policy="predicted", options={"passes": 2}),
        "MSNAG": Method(policy="predicted", options={"predictor": "decay"}),
    }[name]


def methods_of(optimizer: str) -> list[str]:
    """The methods that are tried with an optimizer."""
    return [method for method in METHODS if optimizer == "adamw" or method not in WITH_ADAMW]


def pipelines_of(task: str, method: str) -> list[tuple[int, bool]]:
    """Numbers of stages, and whether they are a chain."""
    if method in EQUALLY_LATE:
        return [(EQUALLY_LATE[method], True)]
    chains = (True,) if task == "text" or method in ON_CHAINS else (True, False)
    return [(number, chain) for number in STAGES for chain in chains]


def runs() -> Iterator[Run]:
    """All of them, seed by seed, so that every table can be read early."""
    for seed, (task, content) in product(SEEDS, TASKS.items()):
        for optimizer, rates in content.rates.items():
            for method, rate in product(methods_of(optimizer), rates):
                for number, chain in pipelines_of(task, method):
                    yield Run(
                        task=task,
                        optimizer=optimizer,
                        method=method,
                        num_stages=number,
                        chain=chain,
                        rate=rate,
                        seed=seed,
                    )


def outcomes(results: Path) -> Mapping[Run, Outcome]:
    """The outcomes in a file, which need not exist yet."""
    lines = results.read_text().splitlines() if results.exists() else []
    entries = map(json.loads, lines)
    return {Run(**entry["run"]): Outcome(**entry["outcome"]) for entry in entries}


def sweep(results: Path) -> None:
    """Do the runs whose outcomes are not in the file, and add them."""
    known = outcomes(results)
    for run in runs():
        if run not in known:
            outcome = train(run, method_of(run.method, TASKS[run.task].num_steps))
            with results.open("a") as file:
                file.write(json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n")
