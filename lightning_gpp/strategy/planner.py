"""From settings and a captured step to a plan: from a file, by hand, by a partitioner; and to one for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_gpp.capture import Capture, capture
from lightning_gpp.capture.declared import Declared, declare, is_declared
from lightning_gpp.cluster import preset
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.plan import SOURCE, STEP, Plan
from lightning_gpp.planning import Request, check_model, manual, partition
from lightning_gpp.planning.assign import StageDraft, make_plan
from lightning_gpp.planning.placement import read
from lightning_gpp.strategy.options import Context, Options, placement_of

TRAINING = "training_step"

WHOLE = 1 << 30
"""A micro-batch size that no mini-batch exceeds: the step of an evaluation runs once per mini-batch."""


def captured_step(
    module: nn.Module, batch: Any, step: str, options: Options, context: Context, device: torch.device
) -> Capture | Declared:
    """What a step computes: captured, or as the user declared it.

    Raises:
        CaptureError, PlanError: see `capture` and `declare`.
    """
    stages = options.stages
    if is_declared(stages) and isinstance(stages, Sequence):
        return declare(module, batch, [dict(entry) for entry in stages], step=step)
    return capture(module, batch, step=step, context=context, device=device)


def plan_for(captured: Capture | Declared, options: Options, num_devices: int, known: Plan | None = None) -> Plan:
    """The plan of a run on `num_devices` devices per pipeline.

    Evaluation keeps the stages of training: those of `known`, the plan of an earlier run, or of the given plan.

    Raises:
        ConfigError: micro-batches and mini-batch do not fit together, or `recompute` names what is no stage.
        PlanError: the stages do not fit the model or the devices.
    """
    if captured.step != TRAINING:
        known = known or options.plan
    if known is None:
        plan = recomputing(_plan_for(captured, options, num_devices), options.recompute)
    else:
        plan = refitted(captured, known)
    if plan.num_devices != num_devices:
        raise PlanError(
            f"The plan needs {plan.num_devices} devices per pipeline, but there are {num_devices} (trainer.devices x "
            "trainer.num_nodes / strategy.num_pipelines). Change these numbers, or the plan (strategy.plan, "
            "strategy.stages)."
        )
    return plan.chained() if options.chain_baseline and known is None else plan


def _plan_for(captured: Capture | Declared, options: Options, num_devices: int) -> Plan:
    if options.plan is not None:
        check_model(options.plan, captured.graph, captured.fingerprint)
        return options.plan
    sizes: dict[str, Any] = {
        "batch_size": captured.batch_size,
        "num_micro_batches": options.num_micro_batches,
        "micro_batch_size": options.micro_batch_size,
        "model": captured.fingerprint,
    }
    if options.stages is not None:
        return manual(captured.graph, placement_of(options.stages), schedule=options.schedule, **sizes)
    cluster = preset("cpu_host", num_devices=num_devices)
    request = Request(cluster=cluster, schedules=(options.schedule,), copies=False, max_replicas=1, **sizes)
    return partition(options.partitioner, captured.graph, request).plan


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
    entries = read(placement_of(options.stages))
    listed = [device for entry in entries for device in entry.devices or ()]
    return 1 + max(listed) if listed else len(entries)


def refitted(captured: Capture | Declared, plan: Plan) -> Plan:
    """The plan's stages for another step or another form of the mini-batch: with the edges and sizes of these."""
    fresh = make_plan(
        captured.graph, _drafts(plan), batch_size=captured.batch_size, schedule=plan.schedule, model=plan.model
    )
    return fresh.chained() if any(edge.artificial for edge in plan.edges) else fresh


def evaluation_plan(captured: Capture | Declared, plan: Plan) -> Plan:
    """The plan's stages for an evaluation step, which runs once per mini-batch behind the micro-batches.

    Where a value cannot be put together from micro-batches, the step runs once per micro-batch as in training.
    """
    drafts = _drafts(plan)
    if isinstance(captured, Capture):
        apart = make_plan(captured.graph, _step_apart(drafts), batch_size=captured.batch_size, schedule=plan.schedule)
        if all(edge.sliceable for edge in apart.edges if edge.src == SOURCE or edge.dst == apart.step_stage):
            return apart
    return make_plan(captured.graph, drafts, batch_size=captured.batch_size, schedule=plan.schedule)


def _drafts(plan: Plan) -> list[StageDraft]:
    return [
        StageDraft(
            name=stage.name,
            modules=stage.modules,
            devices=stage.devices,
            micro_batch_size=stage.micro_batch_size,
            recompute=stage.recompute,
        )
        for stage in plan.stages
    ]


def _step_apart(drafts: Sequence[StageDraft]) -> list[StageDraft]:
    result: list[StageDraft] = []
    for draft in drafts:
        if STEP not in draft.modules:
            result.append(draft)
            continue
        rest = tuple(module for module in draft.modules if module != STEP)
        if rest:
            result.append(replace(draft, modules=rest))
        result.append(replace(draft, name=f"{draft.name} step", modules=(STEP,), micro_batch_size=WHOLE))
    return result
