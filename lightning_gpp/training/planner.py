"""From settings and a captured step to a plan: from a file, by hand, by a partitioner; and to one for evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.costs.roofline import Roofline
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import SOURCE, STEP, Plan
from lightning_gpp.planning import Found, Request, check_model, manual
from lightning_gpp.planning.assignment.assign import StageDraft, assign, make_plan, mixing_stages
from lightning_gpp.planning.assignment.fit import check_sharding
from lightning_gpp.planning.assignment.placement import read
from lightning_gpp.planning.assignment.rebuild import drafts_of, remade, separated
from lightning_gpp.planning.assignment.slices import kept_together
from lightning_gpp.planning.choice import best_schedule
from lightning_gpp.planning.copies import partition_copies
from lightning_gpp.planning.folding import KNOWN, SEARCHED_AS, folded, ordered
from lightning_gpp.planning.problem.answer import Progress
from lightning_gpp.planning.resliced import again, in_slices, put_together, slicing_of
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.slices import is_sliced, unsliced
from lightning_gpp.stages.declared import Declared, declare, is_declared
from lightning_gpp.stages.whole_inputs import with_whole_inputs
from lightning_gpp.training.machine import Machine, first, resolved
from lightning_gpp.training.option_values import AUTO, without_inputs
from lightning_gpp.training.options import DEFAULT, Context, Options, StageSpec, schedules_of

TRAINING = "training_step"

WHOLE = 1 << 30
"""A micro-batch size that no mini-batch exceeds: the step of an evaluation runs once per mini-batch."""


def captured_step(
    module: nn.Module,
    batch: Any,
    step: str,
    options: Options,
    context: Context,
    device: torch.device,
    known: Plan | None = None,
) -> Capture | Declared:
    """What a step computes: captured, or as the user declared it. `known`: the plan of the run, if there is one.

    Raises:
        CaptureError, PlanError: see `capture` and `declare`.
    """
    stages = options.stages
    if is_declared(stages) and isinstance(stages, Sequence):
        return declare(module, batch, [dict(entry) for entry in stages], step=step)
    captured = capture_step(module, batch, step=step, context=context, device=device)
    plan = known or options.plan
    slicing = options.slicing or (slicing_of(plan) if plan is not None else None)
    if slicing is None or step != TRAINING:
        return captured
    captured = replace(captured, graph=with_whole_inputs(captured, module, slicing.dim, context, device))
    return replace(captured, graph=kept_together(captured.graph, slicing.dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan of one pipeline, copies of it, and how it was found, where a partitioner found it."""

    plan: Plan
    num_pipelines: int = 1
    found: Found | None = None


def plan_for(
    captured: Capture | Declared,
    options: Options,
    num_devices: int,
    known: Plan | None = None,
    machine: Callable[[], Machine] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan of a run on `num_devices` devices per pipeline.

    Evaluation keeps the stages of training: those of `known`, the plan of an earlier run, or of the given plan.

    Args:
        captured: the step.
        options: of the strategy.
        num_devices: of one pipeline.
        known: the plan of an earlier run.
        machine: tells what to plan for, of which the first devices are used; by default the cluster in `options`.
        progress: called during the search.

    Raises:
        ConfigError: micro-batches and mini-batch do not fit together, or `recompute` names what is no stage.
        PlanError: the stages do not fit the model or the devices.
    """
    if captured.step != TRAINING:
        known = known or options.plan
    if known is None:
        machine = machine or partial(_default, options, num_devices)
        plan = planned(captured, options, machine, num_devices, progress=progress).plan
    else:
        plan = refitted(captured, known)
    check_devices(plan, num_devices)
    return plan


def _default(options: Options, num_devices: int) -> Machine:
    return Machine(cluster=resolved(options.cluster, num_devices))


class Subject(Protocol):
    """What a plan is made from: a captured step, or a graph from a file."""

    @property
    def graph(self) -> OperatorGraph: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...


def planned(
    captured: Subject,
    options: Options,
    machine: Callable[[], Machine],
    num_devices: int,
    *,
    copies: bool = False,
    progress: Progress | None = None,
) -> Planned:
    """A new plan: from a file, by hand, or by a partitioner.

    Args:
        captured: the step, or what else there is a graph of.
        options: of the strategy.
        machine: asked only where a partitioner is.
        num_devices: to plan for: those of one pipeline, or of all where there may be copies.
        copies: whether the partitioner may choose copies of a smaller pipeline.
        progress: called during the search.

    Raises:
        ConfigError, PlanError: see `plan_for`.
    """
    if options.plan is not None:
        check_model(options.plan, captured.graph, captured.fingerprint)
        result = Planned(plan=_given(options.plan, captured, options, machine))
    elif options.stages is not None:
        result = Planned(plan=_by_hand(captured, options, options.stages, first(machine(), num_devices)))
    else:
        result = _found(captured, options, first(machine(), num_devices), copies, progress)
    plan = finished(result.plan, captured, options)
    if options.schedule == AUTO and is_sliced(plan):
        plan = _ordered(plan, captured, first(machine(), num_devices), schedules_of(options))
    return replace(result, plan=plan)


def finished(plan: Plan, captured: Subject, options: Options) -> Plan:
    """A plan of stages with what the settings say besides: recomputation, sharding, the baseline, slices.

    Raises:
        ConfigError, PlanError: the plan cannot have it.
    """
    slicing = options.slicing or slicing_of(plan)
    plan = recomputing(put_together(plan, captured.graph), options.recompute)
    if options.sharding != "none":
        plan = replace(plan, sharding=options.sharding)
    plan = plan.chained() if options.chain_baseline else plan
    plan = plan if slicing is None else in_slices(plan, captured.graph, slicing)
    check_sharding(plan, captured.graph)
    return plan


def _by_hand(captured: Subject, options: Options, stages: StageSpec, machine: Machine) -> Plan:
    schedules, placement = schedules_of(options), without_inputs(stages)
    plan = manual(
        captured.graph,
        placement,
        schedule=schedules[0] if len(schedules) == 1 else SEARCHED_AS,
        batch_size=captured.batch_size,
        num_micro_batches=options.num_micro_batches,
        micro_batch_size=options.micro_batch_size,
        model=captured.fingerprint,
    )
    if all(entry.devices is None for entry in read(placement)):
        plan = folded(plan, captured.graph, options.stages_per_device)
    plan = replace(plan, sharding=options.sharding)
    return _ordered(plan, captured, machine, schedules)


def _given(plan: Plan, captured: Subject, options: Options, machine: Callable[[], Machine]) -> Plan:
    """A plan from a file, with the schedule that the settings name, if they do."""
    unused = ", ".join(contradicted(plan, options))
    if unused:
        warnings.warn(
            f"{unused} is not used: strategy.plan says something else, and it is the plan that runs. Edit the plan's "
            "file, or make a new one with these settings.",
            stacklevel=2,
        )
    if options.schedule in (None, plan.schedule):
        return plan
    return _ordered(plan, captured, first(machine(), plan.num_devices), schedules_of(options))


def contradicted(plan: Plan, options: Options) -> list[str]:
    """Settings that ask for something else than a given plan."""
    sizes = {stage.micro_batch_size for stage in plan.stages}
    most = max(len(stage.devices) for stage in plan.stages)
    wrong = {
        "num_micro_batches": options.num_micro_batches not in {-(-plan.batch_size // size) for size in sizes},
        "micro_batch_size": options.micro_batch_size not in sizes,
        "max_replicas": options.max_replicas is not None and options.max_replicas < most,
    }
    given = {name: getattr(options, name) for name, is_wrong in wrong.items() if is_wrong}
    return [f"strategy.{name}={value}" for name, value in given.items() if value is not None]


def _ordered(plan: Plan, captured: Subject, machine: Machine, schedules: Sequence[str]) -> Plan:
    """The plan with the best of these schedules, as far as anything is known that could tell them apart."""
    if set(schedules) <= set(KNOWN) or not any(operator.flops.at(1) for operator in captured.graph):
        return replace(plan, schedule=schedules[0] if len(schedules) == 1 else plan.schedule)
    costs = machine.costs or Roofline(captured.graph)
    return ordered(plan, captured.graph, machine.cluster, costs, machine.footprint, schedules)


def _found(captured: Subject, options: Options, machine: Machine, copies: bool, progress: Progress | None) -> Planned:
    request = request_of(captured, options, machine, copies=copies, progress=progress)
    search = partition_copies if len(request.schedules) == 1 else best_schedule
    found = search(options.partitioner, captured.graph, request)
    return Planned(plan=found.plan, num_pipelines=found.num_pipelines, found=found)


def request_of(
    captured: Subject,
    options: Options,
    machine: Machine,
    *,
    copies: bool = False,
    progress: Progress | None = None,
) -> Request:
    """What the settings ask a partitioner for. A list of stages to recompute is for stages that are known later."""
    recompute = options.recompute
    return Request(
        cluster=machine.cluster,
        batch_size=captured.batch_size,
        num_micro_batches=options.num_micro_batches,
        micro_batch_size=options.micro_batch_size,
        schedules=schedules_of(options),
        model=captured.fingerprint,
        costs=machine.costs,
        footprint=machine.footprint,
        recompute=recompute if recompute is None or isinstance(recompute, bool) else False,
        max_replicas=options.max_replicas,
        stages_per_device=options.stages_per_device,
        sharding=options.sharding,
        slicing=options.slicing,
        copies=copies,
        seconds=options.search_seconds,
        progress=progress,
    )


def check_devices(plan: Plan, num_devices: int) -> None:
    """Raise PlanError if the plan is for another number of devices."""
    if plan.num_devices != num_devices:
        raise PlanError(
            f"The plan needs {plan.num_devices} devices per pipeline, but there are {num_devices} (trainer.devices x "
            "trainer.num_nodes / strategy.num_pipelines). Change these numbers, or the plan (strategy.plan, "
            "strategy.stages)."
        )


def recomputing(plan: Plan, recompute: bool | Sequence[str] | None) -> Plan:
    """The plan with these stages recomputed: none (False), all but the step's (True), those listed; None: as it is.

    Raises:
        ConfigError: a listed stage does not exist, or runs the step.
    """
    if recompute is None:
        return plan
    step = plan.stages[plan.step_stage].name
    others = [stage.name for stage in plan.stages if stage.name != step]
    wanted = (others if recompute else []) if isinstance(recompute, bool) else recompute
    unknown = sorted(set(wanted) - {step, *others})
    if unknown:
        raise ConfigError(f"strategy.recompute lists {unknown}; the stages that can be recomputed are {others}.")
    if step in wanted:
        raise ConfigError(
            f"strategy.recompute lists stage {step!r}, which runs the training step: it would log and count twice. "
            f"Leave it out, or give {STEP!r} a stage of its own (strategy.stages); others: {others}."
        )
    return replace(plan, stages=tuple(replace(stage, recompute=stage.name in wanted) for stage in plan.stages))


def devices_wanted(options: Options, world_size: int) -> int:
    """Devices of one pipeline, as far as plan and stages say; else all processes."""
    if options.plan is not None:
        return options.plan.num_devices
    if options.stages is None:
        return world_size
    entries = read(without_inputs(options.stages))
    listed = [device for entry in entries for device in entry.devices or ()]
    if listed:
        return 1 + max(listed)
    usual = 1 if options.schedule == AUTO else method_of(options.schedule or DEFAULT).stages_per_device
    number = options.stages_per_device or usual
    apart = number > 1 and any(entry.modules == (STEP,) for entry in entries)
    return -(-(len(entries) - apart) // number)


def refitted(captured: Capture | Declared, plan: Plan) -> Plan:
    """The plan's stages for another step or another form of the mini-batch: with the edges and sizes of these."""
    slicing, plan = slicing_of(plan), unsliced(plan).plan
    fresh = remade(plan, captured.graph, captured.batch_size)
    return fresh if slicing is None else again(fresh, captured.graph, slicing)


def evaluation_plan(captured: Capture | Declared, plan: Plan) -> Plan:
    """The plan's stages for an evaluation step, which runs once per mini-batch behind the micro-batches.

    Where a value cannot be put together from micro-batches, the step runs once per micro-batch as in training.
    """
    return replace(_evaluation_plan(captured, plan), sharding=plan.sharding)


def _evaluation_plan(captured: Capture | Declared, plan: Plan) -> Plan:
    drafts = _whole_micro_batches(drafts_of(plan), captured.graph)
    if isinstance(captured, Capture):
        apart = make_plan(
            captured.graph, separated(drafts, WHOLE), batch_size=captured.batch_size, schedule=plan.schedule
        )
        if all(edge.sliceable for edge in apart.edges if edge.src == SOURCE or edge.dst == apart.step_stage):
            return apart
    return make_plan(captured.graph, drafts, batch_size=captured.batch_size, schedule=plan.schedule)


def _whole_micro_batches(drafts: Sequence[StageDraft], graph: OperatorGraph) -> list[StageDraft]:
    """Stages whose replicas cannot share a micro-batch in this step, with replicas that take micro-batches in turn."""
    mixing = mixing_stages(graph, assign(graph, [draft.modules for draft in drafts]))
    return [replace(draft, round_robin=draft.round_robin or index in mixing) for index, draft in enumerate(drafts)]
