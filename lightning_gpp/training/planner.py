"""Makes a plan from settings and a captured step: from a file, by hand, by a partitioner, or for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.capture.batch import BatchDims
from lightning_gpp.capture.local_losses import with_local_losses
from lightning_gpp.capture.recording import Event
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning import Prediction, Request, best_order, best_plan, check_model, manual
from lightning_gpp.planning.assignment.complete import check_blocks, completed, rebuilt, slice_again, slicing_of
from lightning_gpp.planning.assignment.layout import lay_out_by_hand
from lightning_gpp.planning.assignment.manual import read
from lightning_gpp.planning.assignment.slices import kept_together
from lightning_gpp.planning.request import SEARCHED, STANDARD, SearchOptions
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.simulation import WeightCopies, no_copies
from lightning_gpp.slices import unsliced
from lightning_gpp.stages.build import Captured, Undivided
from lightning_gpp.stages.slices import with_whole_inputs
from lightning_gpp.training.evaluation_plan import NOWHERE, Held, with_others
from lightning_gpp.training.host import TRAINING
from lightning_gpp.training.measured.machine import Machine, first, resolved
from lightning_gpp.training.option_values import AUTO, weight_copies_of
from lightning_gpp.training.options import DEFAULT, Context, Options, StageSpec, schedules_of
from lightning_gpp.wording import warn


def captured_step(
    module: nn.Module,
    batch: Any,
    step: str,
    options: Options,
    context: Context,
    device: torch.device,
    known: Plan | None = None,
    uncut: Mapping[str, str] = {},
    general: bool = False,
    dims: BatchDims | None = None,
) -> Capture:
    """The captured computation of a step.

    `known`: the plan of the run, if there is one. `uncut`: modules that are called whole, with the reasons. `general`:
    see `capture_step`. `dims`: the dimensions that count samples, if not those of the options.

    Raises:
        CaptureError: see `capture_step`.
    """
    captured = capture_step(
        module,
        batch,
        step=step,
        context=context,
        device=device,
        dims=options.batch_dims if dims is None else dims,
        uncut=uncut,
        general=general,
    )
    _refuse_early_metrics(captured)
    if step == TRAINING and options.local_losses:
        captured = with_local_losses(captured, options.local_losses)
    plan = known or options.plan
    slicing = options.slicing or (slicing_of(plan) if plan is not None else None)
    if slicing is None or step != TRAINING:
        return captured
    return replace(captured, graph=kept_together(with_whole_inputs(captured.graph)))


def _refuse_early_metrics(captured: Capture) -> None:
    """Refuse a step that updates metrics before its last module call: up to there, it runs twice on a micro-batch."""
    for note in captured.network.recording.early(Event.UPDATES_METRIC):
        raise refusal(
            "a line before its last call of a module",
            f"it updates the metric {note.subject!r} there",
            "update metrics after the last call of a module",
        )


def plan_for(
    captured: Captured,
    options: Options,
    num_devices: int,
    known: Plan | None = None,
    machine: Callable[[], Machine] | None = None,
) -> Plan:
    """The plan of a run on `num_devices` devices per pipeline.

    Evaluation keeps the stages of training: those of `known`, the plan of an earlier run, or of the given plan.

    Args:
        captured: the step.
        options: options of the strategy.
        num_devices: number of devices of one pipeline.
        known: the plan of an earlier run.
        machine: the machine to plan for, whose first devices are used; by default the cluster in `options`.

    Raises:
        ConfigError: micro-batches do not fit the mini-batch, or `recompute` names what does not exist.
        PlanError: the stages do not fit the model or the devices.
    """
    if isinstance(captured, Undivided):
        return captured.plan(num_devices)
    if captured.step != TRAINING:
        known = known or options.plan
    if known is None:
        machine = machine or partial(_default, options, num_devices)
        if captured.step != TRAINING:
            captured, options, machine = evaluated(captured, options, machine)
        plan, _ = planned(captured, options, machine, num_devices)
    else:
        plan = refitted(captured, known)
        check_step_device(plan)
    check_devices(plan, num_devices)
    return plan


def part_of_member(captured: Capture, machine: Machine) -> Capture:
    """The part of a step that one process of a device computes, as the subject of a plan."""
    return replace(captured, graph=machine.part(captured.graph))


def _default(options: Options, num_devices: int) -> Machine:
    return Machine(cluster=resolved(options.cluster, num_devices).with_headroom(options.memory_headroom))


def evaluated(
    captured: Capture, options: Options, machine: Callable[[], Machine]
) -> tuple[Capture, Options, Callable[[], Machine]]:
    """A step without a backward, for a run that only evaluates, with the options and the machine that apply to it."""
    graph = captured.graph.for_inference()
    options = replace(options, recompute=False, offload=False, slices=1)
    return replace(captured, graph=graph), options, lambda: machine().for_inference(graph)


def planned(
    captured: Capture,
    options: Options,
    machine: Callable[[], Machine],
    num_devices: int,
    *,
    num_pipelines: int | None = 1,
) -> tuple[Plan, Prediction | None]:
    """A new plan, from a file, by hand, or by a partitioner, of which it has the prediction.

    Args:
        captured: the step.
        options: options of the strategy.
        machine: returns the machine; called only if a partitioner or a schedule needs it.
        num_devices: number of devices of one pipeline, or of all if the number of pipelines is open.
        num_pipelines: pipeline replicas; None leaves their number to the partitioner.

    Raises:
        ConfigError, PlanError: see `plan_for`.
    """
    if options.plan is not None:
        plan = _from_file(options.plan, captured, options)
    elif options.stages is not None:
        plan = _by_hand(options.stages, captured, options)
    else:
        there = first(machine(), num_devices * (num_pipelines or 1))
        if options.concurrent_stages > 1:
            return _concurrent(captured, options, first(there, num_devices)), None
        request = request_of(captured, options, there, num_pipelines=num_pipelines)
        prediction = best_plan(options.partitioner, captured.graph, request)
        plan = prediction.plan.with_members(options.tensor_parallel_size)
        return plan, replace(prediction, plan=plan)
    if options.recompute is None:
        check_blocks(plan, captured.graph)
    plan = completed(
        plan.with_members(options.tensor_parallel_size),
        captured.graph,
        recompute=options.recompute,
        offload=None if options.offload == AUTO else options.offload,
        sharding=options.sharding,
        chained=options.chain_baseline,
        slicing=options.slicing,
    )
    check_step_device(plan)
    return _scheduled(plan, captured, options, machine), None


def _concurrent(captured: Capture, options: Options, machine: Machine) -> Plan:
    """A plan for devices that compute several stages at the same time: each stage has a share of its device."""
    number, count = machine.cluster.num_devices, options.concurrent_stages
    shares = replace(machine, cluster=machine.cluster.shared(count))
    request = replace(request_of(captured, options, shares), max_replicas=1, simplicity=0.0)
    plan = best_plan(options.partitioner, captured.graph, request).plan
    stages = [replace(stage, devices=tuple(device % number for device in stage.devices)) for stage in plan.stages]
    unused = tuple(set(range(number)) - {device for stage in stages for device in stage.devices})
    room = tuple(sum(plan.memory_bytes[device::number]) for device in range(number)) if plan.memory_bytes else ()
    plan = replace(plan, stages=tuple(stages), unused=unused, memory_bytes=room)
    return plan.with_members(options.tensor_parallel_size)


def _by_hand(stages: StageSpec, captured: Capture, options: Options) -> Plan:
    """Stages by hand. Without devices, they are laid out as the schedule requires."""
    schedules = schedules_of(options)
    plan = manual(
        captured.graph,
        stages,
        schedule=schedules[0] if len(schedules) == 1 else STANDARD,
        batch_size=captured.batch_size,
        num_micro_batches=options.num_micro_batches,
        micro_batch_size=options.micro_batch_size,
        model=captured.fingerprint,
    )
    if any(entry.devices is not None for entry in read(stages)):
        return plan
    return lay_out_by_hand(plan, captured.graph, options.stages_per_device)


def _from_file(plan: Plan, captured: Capture, options: Options) -> Plan:
    """The given plan with the sizes of this model and mini-batch, after a warning about settings that it overrides."""
    check_model(plan, captured.graph, captured.fingerprint)
    unused = ", ".join(contradicted(plan, options))
    if unused:
        warn(
            f"{unused} is not used: strategy.plan says otherwise, and the plan takes precedence. Make a new plan with "
            "these settings: gpp-plan ... output=plan.yaml.",
        )
    return refitted(captured, plan)


def _scheduled(plan: Plan, captured: Capture, options: Options, machine: Callable[[], Machine]) -> Plan:
    """The user's stages under the schedule of the settings, or under the fastest of all if the settings leave it open.

    Schedules that weigh actions get their times, if these are known.
    """
    if options.plan is not None and options.schedule in (None, plan.schedule):
        return plan
    schedules = schedules_of(options)
    if set(schedules) <= set(SEARCHED) or not any(operator.flops.at(1) for operator in captured.graph):
        return replace(plan, schedule=schedules[0] if len(schedules) == 1 else plan.schedule)
    there = first(machine(), plan.num_devices)
    return best_order(plan, captured.graph, request_of(captured, options, there)).plan


def contradicted(plan: Plan, options: Options) -> list[str]:
    """Settings that differ from a given plan."""
    sizes = {stage.micro_batch_size for stage in plan.stages}
    most = max(len(stage.devices) for stage in plan.stages)
    wrong = {
        "num_micro_batches": options.num_micro_batches not in {-(-plan.batch_size // size) for size in sizes},
        "micro_batch_size": options.micro_batch_size not in sizes,
        "max_replicas": options.max_replicas is not None and options.max_replicas < most,
    }
    given = {name: getattr(options, name) for name, is_wrong in wrong.items() if is_wrong}
    return [f"strategy.{name}={value}" for name, value in given.items() if value is not None]


def request_of(
    captured: Capture,
    options: Options,
    machine: Machine,
    *,
    num_pipelines: int | None = 1,
) -> Request:
    """The request of the settings, for all devices of the machine."""
    copies = weight_copies_of(options.weights)
    limits = {field.name: getattr(options, field.name) for field in fields(SearchOptions)}
    return Request(
        **limits,
        cluster=machine.cluster,
        batch_size=captured.batch_size * (num_pipelines or 1),
        schedules=schedules_of(options),
        model=captured.fingerprint,
        costs=machine.costs,
        footprint=machine.footprint,
        recompute=_listed(options.recompute),
        offload=options.offload if isinstance(options.offload, str) else _listed(options.offload),
        slicing=options.slicing,
        chained=options.chain_baseline,
        weight_copies=copies if machine.footprint.training else streaming_copies(options),
        num_pipelines=num_pipelines,
        seconds=options.search_seconds,
    )


def _listed(names: bool | Sequence[str] | None) -> bool | tuple[str, ...] | None:
    return names if names is None or isinstance(names, bool) else tuple(names)


def streaming_copies(options: Options) -> WeightCopies | None:
    """Inference that does not flush keeps no copies of weights; None if it flushes."""
    return no_copies if options.streaming and options.sharding != "fsdp" else None


def check_devices(plan: Plan, num_devices: int) -> None:
    """Raise PlanError if the plan is for another number of devices."""
    if plan.num_devices != num_devices:
        raise PlanError(
            f"The plan needs {plan.num_devices} devices per pipeline, not {num_devices} (trainer.devices x "
            f"trainer.num_nodes / strategy.num_pipelines). Start {plan.num_devices} processes for each pipeline."
        )


def check_step_device(plan: Plan) -> None:
    """Refuse a user's plan whose step runs elsewhere than on the device that loads the data.

    Raises:
        ConfigError: names the stage and its devices.
    """
    stage = plan.stages[plan.step_stage]
    if stage.devices != (0,):
        raise ConfigError(
            f"Stage {stage.name!r} runs the user's step ({STEP!r}) on devices {stage.devices}; it must run on device 0 "
            "alone, which loads the data. Number the devices accordingly; to replicate the stage's modules, give "
            f"{STEP!r} a stage of its own."
        )


def devices_wanted(options: Options, world_size: int) -> int:
    """Number of devices of one pipeline if plan or stages say it, otherwise of processes."""
    if options.plan is not None:
        return options.plan.num_devices
    if options.stages is None:
        return world_size
    entries = read(options.stages)
    listed = [device for entry in entries for device in entry.devices or ()]
    if listed:
        return 1 + max(listed)
    usual = 1 if options.schedule == AUTO else method_of(options.schedule or DEFAULT).stages_per_device
    number = options.stages_per_device or usual
    apart = number > 1 and any(entry.modules == (STEP,) for entry in entries)
    return -(-(len(entries) - apart) // number)


def refitted(captured: Captured, plan: Plan, held: Held = NOWHERE) -> Plan:
    """The plan's stages for another step or another form of the mini-batch, with its edges and sizes.

    Modules that the plan does not know are in the stage of the user's step, if that has their parameters (`held`).
    """
    if isinstance(captured, Undivided):
        return captured.plan(plan.num_devices)
    slicing, plan = slicing_of(plan), unsliced(plan).plan
    stages = with_others(plan.stages, captured.graph, held) if held else plan.stages
    known = stages if len(stages) == len(plan.stages) else plan.stages
    fresh = rebuilt(plan, captured.graph, captured.batch_size, known)
    return fresh if slicing is None else slice_again(fresh, captured.graph, slicing)
