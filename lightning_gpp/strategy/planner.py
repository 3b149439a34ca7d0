"""From settings and a captured step to a plan: by hand, from a file, or by a partitioner; and the plan for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_gpp.capture import Capture
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import SOURCE, STEP, Plan
from lightning_gpp.planning import Request, partition
from lightning_gpp.planning.assign import StageDraft, make_plan
from lightning_gpp.planning.micro_batches import resolve_size
from lightning_gpp.strategy.options import Options, StageSpec

WHOLE = 1 << 30
"""A micro-batch size that no mini-batch exceeds: the step of an evaluation runs once per mini-batch."""


def plan_for(capture: Capture, options: Options, num_devices: int) -> Plan:
    """The plan of a run on `num_devices` devices per pipeline.

    Raises:
        ConfigError: micro-batches and mini-batch do not fit together.
        PlanError: the stages do not fit the model or the devices.
    """
    if options.plan is not None:
        plan = _checked(options.plan, capture, num_devices)
    elif options.stages is not None:
        plan = _manual(capture, options, num_devices)
    else:
        plan = _partitioned(capture, options, num_devices)
    return plan.chained() if options.chain_baseline else plan


def devices_wanted(options: Options, world_size: int) -> int:
    """Devices of one pipeline, as far as plan and stages say; else all processes."""
    if options.plan is not None:
        return options.plan.num_devices
    if options.stages is None:
        return world_size
    if isinstance(options.stages, Mapping):
        stages = 1 + max(options.stages.values())
        return stages if world_size % stages == 0 else world_size
    listed = [device for entry in options.stages for device in entry.get("devices") or ()]
    stages = len(options.stages)
    return 1 + max(listed) if listed else (stages if world_size % stages == 0 else world_size)


def _checked(plan: Plan, capture: Capture, num_devices: int) -> Plan:
    if plan.model and plan.model != capture.fingerprint:
        raise PlanError(
            f"strategy.plan was made for another model: its fingerprint is {plan.model}, this model's is "
            f"{capture.fingerprint}. Make a new plan (gpp-plan), or remove strategy.plan."
        )
    if plan.num_devices != num_devices:
        raise PlanError(
            f"strategy.plan needs {plan.num_devices} devices per pipeline, but there are {num_devices} "
            "(trainer.devices x trainer.num_nodes / strategy.num_pipelines)."
        )
    return plan


def _manual(capture: Capture, options: Options, num_devices: int) -> Plan:
    assert options.stages is not None
    entries = stage_entries(options.stages)
    _check_paths(capture.graph, entries)
    names = [entry.get("name") or _short_name(entry["modules"], index) for index, entry in enumerate(entries)]
    modules = [tuple(entry["modules"]) for entry in entries]
    if not any(STEP in listed for listed in modules):
        modules = _with_step(capture.graph, modules)
    drafts = [
        StageDraft(name=name, modules=listed, devices=(0,), micro_batch_size=1)
        for name, listed in zip(names, modules, strict=True)
    ]
    first = make_plan(capture.graph, drafts, batch_size=capture.batch_size, schedule=options.schedule)
    size = resolve_size(
        capture.batch_size, options.num_micro_batches, options.micro_batch_size, default=2 * first.depth
    )
    given = dict(zip(names, entries, strict=True))
    placed = _devices([given[stage.name].get("devices") for stage in first.stages], num_devices)
    final = [
        StageDraft(
            name=stage.name,
            modules=stage.modules,
            devices=devices,
            micro_batch_size=given[stage.name].get("micro_batch_size") or size,
        )
        for stage, devices in zip(first.stages, placed, strict=True)
    ]
    return _finished(capture, final, options)


def stage_entries(stages: StageSpec) -> list[dict[str, Any]]:
    """Either form of `strategy.stages` as a list of mappings."""
    if not isinstance(stages, Mapping):
        return [dict(entry) for entry in stages]
    entries: list[dict[str, Any]] = [{"modules": []} for _ in range(1 + max(stages.values()))]
    for path, number in stages.items():
        entries[number]["modules"].append(path)
    return entries


def _short_name(modules: Sequence[str], index: int) -> str:
    named = [module for module in modules if module != STEP]
    return (named or ["step"])[0] or f"stage{index}"


def _check_paths(graph: OperatorGraph, entries: Sequence[Mapping[str, Any]]) -> None:
    known = {STEP, ""}
    for operator in graph:
        path = operator.module
        while path:
            known.add(path)
            path = path.rpartition(".")[0]
    listed = [path for entry in entries for path in entry["modules"]]
    unknown = [path for path in listed if path not in known]
    if unknown:
        children = sorted(path for path in known if path and "." not in path and not path.startswith("@"))
        raise PlanError(
            f"strategy.stages names module paths that the step does not call: {unknown}. Its outermost modules are "
            f"{children}; paths are as in `model.named_modules()`."
        )


def _with_step(graph: OperatorGraph, modules: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Let the stage that comes last in topological order run the user's step."""
    step = ("@step-alone",)
    drafts = [StageDraft(name=str(i), modules=m, devices=(0,), micro_batch_size=1) for i, m in enumerate(modules)]
    drafts.append(StageDraft(name=step[0], modules=(STEP,), devices=(0,), micro_batch_size=1))
    plan = make_plan(graph, drafts, batch_size=1)
    last = [stage.name for stage in plan.stages if stage.name != step[0]][-1]
    return [(*m, STEP) if str(i) == last else m for i, m in enumerate(modules)]


def _devices(given: Sequence[Sequence[int] | None], num_devices: int) -> list[tuple[int, ...]]:
    """Devices of stages in topological order: as given, else spread evenly, the last stage on device 0."""
    if len(given) < num_devices and not any(given):
        raise PlanError(
            f"strategy.stages has {len(given)} stages for {num_devices} devices per pipeline, so some would be idle. "
            "List more stages, give `devices` (several per stage replicate it), or set strategy.num_pipelines."
        )
    spread = [num_devices - 1 - index * num_devices // len(given) for index in range(len(given))]
    return [tuple(devices) if devices else (spread[index],) for index, devices in enumerate(given)]


def _partitioned(capture: Capture, options: Options, num_devices: int) -> Plan:
    request = Request(
        num_devices=num_devices,
        batch_size=capture.batch_size,
        num_micro_batches=options.num_micro_batches,
        micro_batch_size=options.micro_batch_size,
        schedule=options.schedule,
        model=capture.fingerprint,
    )
    return partition(options.partitioner, capture.graph, request)


def _finished(capture: Capture, drafts: Sequence[StageDraft], options: Options) -> Plan:
    return make_plan(
        capture.graph, drafts, batch_size=capture.batch_size, schedule=options.schedule, model=capture.fingerprint
    )


def training_plan(capture: Capture, plan: Plan) -> Plan:
    """The plan with the edges of another form of the mini-batch: sizes may differ, stages do not."""
    fresh = make_plan(capture.graph, _drafts(plan), batch_size=capture.batch_size, schedule=plan.schedule)
    artificial = tuple(edge for edge in plan.edges if edge.artificial)
    return replace(plan, edges=fresh.edges + artificial)


def evaluation_plan(capture: Capture, plan: Plan) -> Plan:
    """The plan's stages for an evaluation step, which runs once per mini-batch behind the micro-batches.

    Where a value cannot be put together from micro-batches, the step runs once per micro-batch as in training.
    """
    drafts = _drafts(plan)
    apart = make_plan(capture.graph, _step_apart(drafts), batch_size=capture.batch_size, schedule=plan.schedule)
    if all(edge.sliceable for edge in apart.edges if edge.src == SOURCE or edge.dst == apart.step_stage):
        return apart
    return make_plan(capture.graph, drafts, batch_size=capture.batch_size, schedule=plan.schedule)


def _drafts(plan: Plan) -> list[StageDraft]:
    return [
        StageDraft(
            name=stage.name,
            modules=stage.modules,
            devices=stage.devices,
            micro_batch_size=stage.micro_batch_size,
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
