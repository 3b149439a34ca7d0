"""The message for models that fit no device: the reason, and changes that help. Every suggestion was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Final

from lightning_gpp.costs.model import OPTIMIZER_STATES
from lightning_gpp.plan import STEP
from lightning_gpp.planning.assignment.modules import stage_names
from lightning_gpp.planning.problem.draft import Draft, compress
from lightning_gpp.planning.problem.evaluate import Evaluation, Evaluator
from lightning_gpp.planning.problem.partitioner import SearchControl, partitioner_of
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.stage_figures import static_bytes

SECONDS_PER_TRIAL: Final = 1.0
"""Time limit of the search under one suggestion."""

SMALLER: Final = 4
"""Number of smaller micro-batch sizes to try, each half of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change of the problem in words, and the changed problem."""

    text: str
    problem: Problem


def advice(problem: Problem, draft: Draft | None) -> str:
    """The memory excess of the draft's worst device, its stage, and changes that would make it fit.

    Args:
        problem: the one that has no plan.
        draft: the one that comes closest; None searches for one briefly.
    """
    if problem.num_units * problem.max_replicas < problem.num_devices and not problem.idle_devices:
        return _too_many_devices(problem)
    draft = draft or searched(problem)
    evaluation = Evaluator(problem)(draft) if draft is not None else Evaluation(seconds=inf)
    if draft is None or not isfinite(evaluation.seconds):
        return _no_stages(problem)
    if evaluation.fits:
        return "The partitioner 'auto' finds a plan that fits: choose strategy.partitioner=auto."
    working = _working(problem)
    remedy = "What would make it fit (each was tried): " + "; ".join(working) if working else _nothing_helps(problem)
    return f"{described(problem, draft, evaluation)} {remedy}."


def described(problem: Problem, draft: Draft, evaluation: Evaluation) -> str:
    """The device that lacks most memory, what it needs, and for what."""
    limits = [min(stage.devices, key=lambda device: problem.memory_bytes[device]) for stage in draft.stages]
    lacks = [peak - problem.memory_bytes[device] for peak, device in zip(evaluation.peak_bytes, limits, strict=True)]
    worst = max(range(len(lacks)), key=lacks.__getitem__)
    stage, device, peak = draft.stages[worst], limits[worst], evaluation.peak_bytes[worst]
    static, copied = static_bytes(problem, stage, evaluation.sharding), evaluation.copied_bytes[worst]
    loaded = evaluation.loaded_bytes[worst]
    besides = f"{_gb(copied)} older weights (strategy.weights), " if copied else ""
    besides += f"{_gb(loaded)} the mini-batch, which is loaded there, " if loaded else ""
    return (
        f"The model does not fit the devices: stage {_name(problem, draft, worst)!r} needs {_gb(peak)} on device "
        f"{device} ({problem.cluster.devices[device].name}), which has {_gb(problem.memory_bytes[device])}: "
        f"{_gb(lacks[worst])} too much. {_gb(static)} are weights, gradients and the state of the optimizer "
        f"({problem.footprint.optimizer}), {besides}{_gb(peak - static - copied - loaded)} activations of "
        f"{_batches(evaluation.in_flight[worst])} of {stage.share} samples in flight"
        f"{' (recomputed)' if evaluation.recompute[worst] else ''}"
        f"{' (offloaded)' if evaluation.offload[worst] else ''}."
    )


def searched(problem: Problem, seconds: float = SECONDS_PER_TRIAL) -> Draft | None:
    """The draft that the default partitioner finds in a short time, whether it fits or not."""
    return partitioner_of("auto")(problem, SearchControl(seconds=seconds)).draft


def _working(problem: Problem) -> list[str]:
    """Suggestions with which the model fits: the mildest of each kind; if no single one suffices, all together."""
    kinds = (_recomputed, _scheduled, _smaller, _shared, _leaner)
    found = (next(filter(_fits, kind(problem)), None) for kind in kinds)
    return [suggestion.text for suggestion in found if suggestion] or _together(problem)


def _fits(suggestion: Suggestion) -> bool:
    found = searched(suggestion.problem)
    return found is not None and Evaluator(suggestion.problem)(found).fits


def _recomputed(problem: Problem) -> Iterator[Suggestion]:
    if problem.recompute is False:
        yield Suggestion(text="strategy.recompute=true", problem=replace(problem, recompute=True))


def _scheduled(problem: Problem) -> Iterator[Suggestion]:
    if problem.schedules == ("gpipe",):
        yield Suggestion(text="strategy.schedule=1f1b", problem=replace(problem, schedules=("1f1b",)))


def _smaller(problem: Problem) -> Iterator[Suggestion]:
    """Smaller micro-batches, if the user fixed the size; otherwise the partitioner has tried them."""
    halves = (problem.sizes[0] >> shift for shift in range(1, SMALLER + 1) if len(problem.sizes) == 1)
    for size in filter(None, halves):
        yield Suggestion(text=f"strategy.micro_batch_size={size}", problem=replace(problem, sizes=(size,)))


def _shared(problem: Problem) -> Iterator[Suggestion]:
    if isfinite(problem.max_replicas) and problem.max_replicas < problem.num_devices:
        yield Suggestion(text="strategy.max_replicas=null", problem=replace(problem, max_replicas=inf))


def _leaner(problem: Problem) -> Iterator[Suggestion]:
    states = OPTIMIZER_STATES[problem.footprint.optimizer]
    for name, words in (("sgd_momentum", "SGD with momentum"), ("sgd", "SGD without momentum")):
        if OPTIMIZER_STATES[name] < states:
            leaner = replace(problem, footprint=replace(problem.footprint, optimizer=name))
            text = f"{words} as optimizer (for a graph from a file: optimizer={name})"
            yield Suggestion(text=text, problem=leaner)


def _together(problem: Problem) -> list[str]:
    """All suggestions, each at its strongest, combined."""
    strongest, texts = problem, list[str]()
    for kind in (_recomputed, _scheduled, _smaller, _leaner):
        for suggestion in [*kind(strongest)][-1:]:
            strongest, texts = suggestion.problem, [*texts, suggestion.text]
    together = Suggestion(text=" and ".join(texts) + " together", problem=strongest)
    return [together.text] if len(texts) > 1 and _fits(together) else []


def _too_many_devices(problem: Problem) -> str:
    most = int(problem.num_units * problem.max_replicas)
    return (
        f"The model can be cut into {problem.num_units} pieces at most, so with strategy.max_replicas="
        f"{problem.max_replicas:g} it fills {most} devices; there are {problem.num_devices}, and a plan uses them all. "
        f"Raise strategy.max_replicas (null: no limit), raise strategy.num_pipelines, use at most {most} devices, or "
        "let others be idle (strategy.idle_devices=true)."
    )


def _no_stages(problem: Problem) -> str:
    rigid = sum(not unit.divisible for unit in problem.units.units)
    cause = f" {rigid} of them read data that cannot be divided among replicas." if rigid else ""
    return (
        f"No stages were found that fill all {problem.num_devices} devices with {problem.num_units} pieces of the "
        f"model.{cause} Let devices be idle (strategy.idle_devices=true), use fewer per pipeline "
        "(strategy.num_pipelines), or place stages by hand (strategy.stages)."
    )


def _nothing_helps(problem: Problem) -> str:
    unit = int(problem.static_bytes.argmax())
    alone, most = float(problem.static_bytes[unit]), float(problem.memory_bytes.max())
    if alone > most:
        name = ", ".join(module for module in problem.units.units[unit].modules if module != STEP) or STEP
        return (
            f"Module {name!r} alone takes {_gb(alone)} of weights, gradients and optimizer state: divide it into "
            "submodules"
        )
    return "Neither recomputation, smaller micro-batches nor a leaner optimizer were enough: use more or larger devices"


def _name(problem: Problem, draft: Draft, index: int) -> str:
    units = problem.units.units
    modules = [[path for unit in stage.units for path in units[unit].modules] for stage in draft.stages]
    return stage_names(compress(problem.graph, modules))[index]


def _batches(number: int) -> str:
    return f"{number} micro-batch{'es' if number > 1 else ''}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.3g} kB"
