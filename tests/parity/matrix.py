"""Every schedule on every shape of model: how stages lie on devices, and one rank's run against the plain model.

A new variant is a line in `VARIANTS`; where it does not suit all schedules, it names those it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_gpp.capture import Capture, capture_step, slice_batch
from lightning_gpp.plan import SOURCE, STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.planning.assignment.layout import both_ways, laid_out
from lightning_gpp.planning.assignment.slices import Slicing, sliced
from lightning_gpp.runtime import DistributedTransport, Executor, GradientSync, Mesh, RandomStreams, pairs_of
from lightning_gpp.runtime.sharding import ShardedStages
from lightning_gpp.schedules import Program, compile_program, schedule_names
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.stages import build
from lightning_gpp.stages.step import InContext
from tests.parity.shapes import MODELS, data, made

NUM_PROCESSES = 4
BATCH, SIZE = 12, 2
"""Samples of one pipeline, and of a micro-batch: six micro-batches on at most four devices."""

SOME = ("1f1b", "breadth_first", "chimera", "interleaved", "zbv", "zero_bubble")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What all schedules run with. `num_replicas` of every stage, which share micro-batches.

    `tolerance` of losses and gradients, relative to the largest entry. Under autocast to bfloat16 the reference takes
    the same micro-batches, so that the same numbers are rounded; then only the order of float32 sums differs.
    """

    num_replicas: int = 1
    num_pipelines: int = 1
    recompute: bool = False
    offload: bool = False
    bfloat16: bool = False
    sharding: str = "none"
    slices: int | tuple[int, ...] | None = None
    schedules: tuple[str, ...] = ()
    tolerance: float = 1e-12

    @property
    def num_positions(self) -> int:
        """Devices of a pipeline, the replicas of a stage counted as one."""
        return NUM_PROCESSES // (self.num_replicas * self.num_pipelines)


VARIANTS = {
    "alone": Variant(),
    "replicas": Variant(num_replicas=2),
    "pipelines": Variant(num_pipelines=2),
    "recomputed": Variant(recompute=True),
    "offloaded": Variant(offload=True, schedules=SOME),
    "bfloat16": Variant(bfloat16=True, tolerance=2**-20),
    "zero1": Variant(num_replicas=2, sharding="zero1"),
    "fsdp": Variant(num_replicas=2, sharding="fsdp"),
    "pipelines, fsdp": Variant(num_pipelines=2, sharding="fsdp", schedules=SOME),
    "fsdp, recomputed": Variant(num_replicas=2, sharding="fsdp", recompute=True, schedules=SOME),
    "fsdp, offloaded": Variant(num_replicas=2, sharding="fsdp", offload=True, schedules=SOME),
}

IN_SLICES = {
    "slices": Variant(slices=2),
    "uneven slices": Variant(slices=(3, 1, 4), schedules=SOME),
    "slices, replicas": Variant(slices=4, num_replicas=2, schedules=SOME),
    "slices, pipelines": Variant(slices=2, num_pipelines=2, schedules=SOME),
    "slices, recomputed": Variant(slices=2, recompute=True, schedules=SOME),
    "slices, zero1": Variant(slices=2, num_replicas=2, sharding="zero1", schedules=SOME),
}
"""For models of sequences."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A point of the matrix."""

    model: str
    variant: Variant
    schedule: str
    label: str


def runs(model: str) -> Iterator[Run]:
    variants = IN_SLICES if MODELS[model].is_sequence else VARIANTS
    for schedule, (label, variant) in product(schedule_names(), variants.items()):
        if schedule in (variant.schedules or schedule_names()):
            yield Run(model=model, variant=variant, schedule=schedule, label=f"{model}, {schedule}, {label}")


def plan_of(captured: Capture, run: Run) -> Plan:
    """As many stages per device as the schedule is made for; the user's step is a stage of its own."""
    method, variant = method_of(run.schedule), run.variant
    number = variant.num_positions * method.stages_per_device
    parts = [*MODELS[run.model].in_stages(number), (STEP,)]
    drafts = [
        Stage(
            name=f"s{i}",
            modules=modules,
            devices=(0,),
            micro_batch_size=SIZE,
            recompute=variant.recompute and STEP not in modules,
            offload=variant.offload,
        )
        for i, modules in enumerate(parts)
    ]
    plan = make_plan(captured.graph, drafts, batch_size=BATCH, schedule=run.schedule)
    plan = laid_out(plan, variant.num_positions, method.layout)
    if method.bidirectional:
        plan = both_ways(captured.graph, plan)
    plan = replicated(replace(plan, sharding=variant.sharding), variant.num_replicas)
    return plan if variant.slices is None else sliced(plan, captured.graph, Slicing(slices=variant.slices))


def replicated(plan: Plan, number: int) -> Plan:
    """Every device becomes so many."""

    def devices(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(place * number + i for place in places for i in range(number))

    return replace(plan, stages=tuple(replace(stage, devices=devices(stage.devices)) for stage in plan.stages))


@cache
def subject(model: str, bfloat16: bool) -> tuple[nn.Module, Capture]:
    """The model, captured."""
    dtype = torch.float32 if bfloat16 else torch.float64
    module = made(model, dtype)
    return module, capture_step(module, data(model, BATCH, dtype), context=context_of(bfloat16))


def context_of(bfloat16: bool) -> Callable[[], AbstractContextManager[Any]]:
    return partial(torch.autocast, "cpu", dtype=torch.bfloat16) if bfloat16 else nullcontext


@cache
def expected(model: str, variant: Variant) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the plain model, on the whole mini-batch at once; in bfloat16 on its micro-batches."""
    module = made(model, torch.float32 if variant.bfloat16 else torch.float64)
    total = BATCH * variant.num_pipelines
    batch, size = whole_batch(model, variant), SIZE if variant.bfloat16 else total
    loss = 0.0
    for start in range(0, total, size):
        with context_of(variant.bfloat16)():
            part = module.training_step(slice_batch(batch, start, start + size, total), 0)
        (part * size / total).backward()
        loss += part.item() * size / total
    return loss, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def whole_batch(model: str, variant: Variant) -> Any:
    return data(model, BATCH * variant.num_pipelines, torch.float32 if variant.bfloat16 else torch.float64)


def run_all(rank: int, model: str, share: slice) -> list[str]:
    """Everything that is wrong on this rank in a share of the runs of a model."""
    chosen = list(runs(model))[share]
    programs = compiled(rank, chosen)
    return [trouble for run in chosen for trouble in troubles(rank, run, programs[run.label])]


def compiled(rank: int, chosen: list[Run]) -> dict[str, Program]:
    """All programs; each process makes its share of them."""
    mine = {run.label: _compiled(run) for run in chosen[rank::NUM_PROCESSES]}
    shares: list[Any] = [None] * NUM_PROCESSES
    dist.all_gather_object(shares, mine)
    return {label: program for share in shares for label, program in share.items()}


def _compiled(run: Run) -> Program:
    plan = plan_of(subject(run.model, run.variant.bfloat16)[1], run)
    return compile_program(plan, copies=run.variant.num_pipelines)


mesh_of = cache(Mesh)
"""The same process groups for all runs of the same form."""


def troubles(rank: int, run: Run, program: Program) -> Iterator[str]:
    """Run one mini-batch, and compare."""
    plan, variant = program.plan, run.variant
    mesh = mesh_of(plan.num_devices, variant.num_pipelines, rank)
    _, captured = subject(run.model, variant.bfloat16)
    module = made(run.model, torch.float32 if variant.bfloat16 else torch.float64)
    pipeline = build(captured, plan, module)
    sync = sync_of(plan, module, pipeline.parameters, mesh)
    executor = Executor(
        program,
        mesh.device,
        stages=[InContext(stage, context_of(variant.bfloat16)) for stage in pipeline.stages],
        slots=pipeline.slots,
        transport=DistributedTransport(mesh, pairs_of(plan)),
        source=pipeline.source if mesh.device in plan.devices_of(SOURCE) else None,
        streams=RandomStreams(0, torch.device("cpu")),
        sharding=sync,
    )
    total = BATCH * variant.num_pipelines
    batch = slice_batch(whole_batch(run.model, variant), mesh.pipeline * BATCH, (mesh.pipeline + 1) * BATCH, total)
    pipeline.step.begin(batch, lambda samples: module.training_step(samples, 0), 0)
    sync.last = True
    executor.run(loss_weight=1 / total)
    loss = torch.zeros((), dtype=torch.float64)
    for part, output in pipeline.step.outputs:
        loss += output.detach() * part.num_samples / total
    pipeline.step.end()
    dist.all_reduce(loss)
    sync.sync()
    gradients = {name: whole(p.grad) for name, p in module.named_parameters() if mesh.device in devices_of(plan, name)}
    for trouble in differences(loss.item(), gradients, *expected(run.model, variant), variant.tolerance):
        yield f"{run.label}: {trouble}"
    not_split = {stage: why for stage, why in executor.not_split.items() if plan.stages[stage].modules != (STEP,)}
    if not_split:
        yield f"{run.label}: backwards not split: {not_split}"


def devices_of(plan: Plan, name: str) -> set[int]:
    """The devices of the stage that has a parameter."""
    return next(set(s.devices) for s in plan.stages if any(name.startswith(f"{module}.") for module in s.modules))


def sync_of(
    plan: Plan, module: nn.Module, used: tuple[tuple[str, ...], ...], mesh: Mesh
) -> GradientSync | ShardedStages:
    """What the ranks with the same stage do together. Gradients are the same with and without ZeRO-1."""
    names = [name for name, _ in module.named_parameters()]
    stage_of = {name: tuple(stage for stage, found in enumerate(used) if name in found) for name in names}
    holders = {
        name: [mesh.global_rank(device, p) for p in range(mesh.num_pipelines) for device in devices_of(plan, name)]
        for name in names
    }
    mine = {name: p for name, p in module.named_parameters() if mesh.rank in holders[name]}
    if plan.sharding == "fsdp":
        return ShardedStages(module, mine, holders, mesh, stages=stage_of)
    return GradientSync(mine, holders, mesh, stages=stage_of)


def whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def differences(
    loss: float,
    gradients: dict[str, Tensor | None],
    loss_of_one: float,
    gradients_of_one: dict[str, Tensor],
    tolerance: float,
) -> Iterator[str]:
    """Gradients are compared to the parameter's largest; where that is below a thousandth of the model's largest, to
    this thousandth: sums that cancel have no relative accuracy."""
    if not abs(loss - loss_of_one) <= tolerance * abs(loss_of_one):
        yield f"the loss is {loss}, not {loss_of_one}"
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in gradients_of_one.values())
    for name, gradient in gradients.items():
        if gradient is None:
            yield f"{name} has no gradient"
            continue
        error = (gradient - gradients_of_one[name]).abs().max().item()
        scale = max(gradients_of_one[name].abs().max().item(), floor)
        if not error <= tolerance * scale:
            yield f"the gradient of {name} is off by {error:.3g}, size {scale:.3g}"
