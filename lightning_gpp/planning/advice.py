"""The message for models that fit no device: what is missing where, and settings that change it."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Final

from lightning_gpp.plan import STEP
from lightning_gpp.planning.assignment.assign import compress
from lightning_gpp.planning.assignment.modules import stage_names
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.planning.problem.evaluate import Evaluation, Evaluator
from lightning_gpp.planning.problem.partitioner import SearchControl, partitioner_of
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.stage_figures import static_bytes

SECONDS: Final = 1.0
"""Time limit of the search for a draft to describe."""


def advice(problem: Problem, draft: Draft | None) -> str:
    """The memory excess of the draft's worst device, its stage, and settings that may make it fit.

    Args:
        problem: the one that has no plan.
        draft: the one that comes closest; None searches for one briefly.
    """
    draft = draft or partitioner_of("auto")(problem, SearchControl(seconds=SECONDS)).draft
    evaluation = Evaluator(problem)(draft) if draft is not None else None
    if draft is None or evaluation is None or not isfinite(evaluation.seconds):
        return (
            f"No stages were found that fill all {problem.num_devices} devices with {problem.num_units} pieces of the "
            "model, of which some may read data that replicas cannot divide. Raise strategy.max_replicas (null: no "
            "limit), let devices be idle (strategy.idle_devices=true), use fewer per pipeline "
            "(strategy.num_pipelines), or place stages by hand (strategy.stages)."
        )
    if evaluation.fits:
        return "The partitioner 'auto' finds a plan that fits: choose strategy.partitioner=auto."
    return f"{_described(problem, draft, evaluation)} What may help: {'; '.join(_settings(problem))}."


def _described(problem: Problem, draft: Draft, evaluation: Evaluation) -> str:
    """The device that lacks most memory, what it needs, and for what."""
    limits = [min(stage.devices, key=lambda device: problem.memory_bytes[device]) for stage in draft.stages]
    lacks = [peak - problem.memory_bytes[device] for peak, device in zip(evaluation.peak_bytes, limits, strict=True)]
    worst = max(range(len(lacks)), key=lacks.__getitem__)
    stage, device, peak = draft.stages[worst], limits[worst], evaluation.peak_bytes[worst]
    static, number = static_bytes(problem, stage, evaluation.sharding), evaluation.in_flight[worst]
    modules = [[path for unit in stage.units for path in problem.units.units[unit].modules] for stage in draft.stages]
    return (
        f"The model does not fit the devices: stage {stage_names(compress(problem.graph, modules))[worst]!r} needs "
        f"{_gb(peak)} on device {device} ({problem.cluster.devices[device].name}), which has "
        f"{_gb(problem.memory_bytes[device])}: {_gb(lacks[worst])} too much. {_gb(static)} are weights, gradients and "
        f"the state of the optimizer ({problem.footprint.optimizer}), {_gb(peak - static)} the activations of {number} "
        f"micro-batch{'es' * (number > 1)} of {stage.share} samples in flight, and what else is held."
    )


def _settings(problem: Problem) -> Iterator[str]:
    """Settings that the user may change."""
    if problem.recompute is False:
        yield "strategy.recompute=true"
    if problem.schedules == ("gpipe",):
        yield "strategy.schedule=1f1b"
    if len(problem.sizes) == 1 and problem.sizes[0] > 1:
        yield f"strategy.micro_batch_size={problem.sizes[0] // 2} or less"
    if problem.max_replicas < problem.num_devices:
        yield "strategy.max_replicas=null"
    if not problem.footprint.optimizer.startswith("sgd"):
        yield "SGD as optimizer"
    unit = int(problem.static_bytes.argmax())
    if problem.static_bytes[unit] > problem.memory_bytes.max():
        name = ", ".join(module for module in problem.units.units[unit].modules if module != STEP) or STEP
        yield f"submodules instead of {name!r}, which alone takes {_gb(problem.static_bytes[unit])}"
    yield "more or larger devices"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.3g} kB"
