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
        return _no_stages(problem)
    if evaluation.fits:
        return "The partitioner 'auto' finds a plan that fits: choose strategy.partitioner=auto."
    return f"{_described(problem, draft, evaluation)} {_too_large(problem) or _remedies(problem)}."


def _described(problem: Problem, draft: Draft, evaluation: Evaluation) -> str:
    """The device that lacks most memory, what it needs, and for what."""
    limits = [min(stage.devices, key=lambda device: problem.memory_bytes[device]) for stage in draft.stages]
    lacks = [peak - problem.memory_bytes[device] for peak, device in zip(evaluation.peak_bytes, limits, strict=True)]
    worst = max(range(len(lacks)), key=lacks.__getitem__)
    stage, device, peak = draft.stages[worst], limits[worst], evaluation.peak_bytes[worst]
    static, number = static_bytes(problem, stage, evaluation.sharding), evaluation.in_flight[worst]
    return (
        f"The model does not fit the devices: stage {_name(problem, draft, worst)!r} needs {_gb(peak)} on device "
        f"{device} ({problem.cluster.devices[device].name}), which has {_gb(problem.memory_bytes[device])}: "
        f"{_gb(lacks[worst])} too much. {_gb(static)} are weights, gradients and the state of the optimizer "
        f"({problem.footprint.optimizer}), {_gb(peak - static)} the activations of {number} "
        f"micro-batch{'es' * (number > 1)} of {stage.share} samples in flight, and what else is held."
    )


def _remedies(problem: Problem) -> str:
    return f"What may help: {'; '.join(_settings(problem))}"


def _settings(problem: Problem) -> Iterator[str]:
    """Settings that the user has chosen and may change."""
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
    yield "more or larger devices"


def _too_large(problem: Problem) -> str:
    """The remedy for a module that no device can hold; empty if there is none."""
    unit = int(problem.static_bytes.argmax())
    alone = float(problem.static_bytes[unit])
    if alone <= float(problem.memory_bytes.max()):
        return ""
    name = ", ".join(module for module in problem.units.units[unit].modules if module != STEP) or STEP
    return (
        f"Module {name!r} alone takes {_gb(alone)} of weights, gradients and optimizer state: divide it into submodules"
    )


def _no_stages(problem: Problem) -> str:
    rigid = sum(not unit.divisible for unit in problem.units.units)
    cause = f" {rigid} of them read data that cannot be divided among replicas." if rigid else ""
    return (
        f"No stages were found that fill all {problem.num_devices} devices with {problem.num_units} pieces of the "
        f"model.{cause} Raise strategy.max_replicas (null: no limit), let devices be idle "
        "(strategy.idle_devices=true), use fewer per pipeline (strategy.num_pipelines), or place "
        "stages by hand (strategy.stages)."
    )


def _name(problem: Problem, draft: Draft, index: int) -> str:
    units = problem.units.units
    modules = [[path for unit in stage.units for path in units[unit].modules] for stage in draft.stages]
    return stage_names(compress(problem.graph, modules))[index]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.3g} kB"
