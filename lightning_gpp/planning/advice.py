"""The message for models that fit no device: what is missing where, and settings that change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Final

from lightning_gpp.cluster import Cluster
from lightning_gpp.costs.model import Footprint, held_copies
from lightning_gpp.plan import STEP
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import SearchControl, partitioner_of
from lightning_gpp.planning.problem.prediction import Prediction
from lightning_gpp.planning.problem.problem import Problem

SECONDS: Final = 1.0
"""Time limit of the search for a draft to describe."""


def advice(problem: Problem, predict: Callable[[Draft], Prediction], closest: Prediction | None) -> str:
    """The memory excess of the worst device, its stages, and settings that may make them fit.

    Args:
        problem: the one that has no plan.
        predict: simulates a draft.
        closest: the plan that comes closest; None searches for one briefly.
    """
    closest = closest or _found(problem, predict)
    if closest is None:
        return (
            f"No stages were found that fill all {problem.num_devices} devices with {problem.num_units} pieces of the "
            "model, of which some may read data that replicas cannot divide. Raise strategy.max_replicas (null: no "
            "limit), let devices be idle (strategy.idle_devices=true), use fewer per pipeline "
            "(strategy.num_pipelines), or place stages by hand (strategy.stages)."
        )
    if closest.fits:
        return "The partitioner 'auto' finds a plan that fits: choose strategy.partitioner=auto."
    described = shortage(closest, problem.cluster, problem.footprint)
    return f"{described} What may help: {'; '.join(_settings(problem))}."


def _found(problem: Problem, predict: Callable[[Draft], Prediction]) -> Prediction | None:
    draft = partitioner_of("auto")(problem, SearchControl(seconds=SECONDS)).draft
    return None if draft is None or not isfinite(Evaluator(problem)(draft).seconds) else predict(draft)


def shortage(closest: Prediction, cluster: Cluster, footprint: Footprint) -> str:
    """The device that lacks most memory, what it needs, and for what.

    `closest`: of a plan that does not fit `cluster`.
    """
    plan, usage = closest.plan, list(zip(closest.peak_bytes, closest.memory_bytes, strict=True))
    device = max(range(plan.num_devices), key=lambda device: usage[device][0] - usage[device][1])
    peak, limit = usage[device]
    stages = [plan.stages[stage] for stage in plan.stages_on(device)]
    ranks = [len(stage.devices) * closest.num_pipelines for stage in stages]
    copies = [held_copies(footprint.copies, plan.sharding, number) for number in ranks]
    static = sum(each * stage.figures.parameter_bytes for each, stage in zip(copies, stages, strict=True))
    number = max(closest.in_flight[stage] for stage in plan.stages_on(device))
    samples = max(-(-stage.micro_batch_size // len(stage.devices)) for stage in stages)
    return (
        f"The model does not fit the devices: stage {' and '.join(repr(stage.name) for stage in stages)} needs "
        f"{_gb(peak)} on device {device} ({cluster.devices[device].name}), which has {_gb(limit)}: "
        f"{_gb(peak - limit)} too much. {_gb(static)} are weights, gradients and the state of the optimizer "
        f"({footprint.optimizer}), {_gb(peak - static)} the activations "
        f"of {number} micro-batch{'es' * (number > 1)} of {samples} samples in flight, and what else is held."
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
