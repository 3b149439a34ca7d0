"""The self-check before training: the split and the unsplit model must give the same loss and gradient for a
micro-batch.

It catches errors that no shape check can: a model that a cut changed, a value sent to the wrong stage, a weight that is
no longer tied. It works on copies, so that the user's module, metrics and random numbers do not change.

Gradients are compared by random projections: each rank projects its part, and the projections of parts add up to that
of the full gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.random import fork_rng

from lightning_gpp._compat.lightning_module import set_trainer, trainer_of
from lightning_gpp._compat.torch import BatchNorm
from lightning_gpp.capture import Capture, slice_batch
from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.capture.record import step_arguments
from lightning_gpp.errors import SelfCheckError
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.neutral import Neutral
from lightning_gpp.runtime.random import undisturbed
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.runtime.transport import Transport
from lightning_gpp.stages import build
from lightning_gpp.stages.declared import Declared
from lightning_gpp.stages.step import Invocation, loss_of
from lightning_gpp.training.control import Control
from lightning_gpp.training.host import Job
from lightning_gpp.training.parameters import Placement, equalise, tensors_of
from lightning_gpp.training.planner import TRAINING
from lightning_gpp.training.session import Session

SMALL: Final = 50_000_000
"""Number of parameters up to which a model is checked by default."""

PROJECTIONS: Final = 3
TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Tolerances relative to the gradient's norm; wide for low precision, as wrong models are sought, not rounding."""


def refuses_check(module: nn.Module, plan: Plan) -> str:
    """Why a comparison would fail for a correct model; empty if it can be made."""
    replicated = any(len(stage.devices) > 1 for stage in plan.stages)
    if replicated and any(isinstance(part, BatchNorm) for part in module.modules()):
        return "BatchNorm in replicated stages normalises each replica's share by itself"
    if any(parameter.is_meta for parameter in module.parameters()):
        return "the model is on the meta device"
    return ""


def check_first(job: Job, captured: Capture | Declared, plan: Plan, batch: Any, transport: Transport) -> None:
    """Compare split and unsplit model on the first pipeline if the user wants it and it is possible. All ranks call
    this.

    Raises:
        SelfCheckError: see `self_check`.
    """
    if captured.step != TRAINING or not _wanted(job, plan):
        return
    equalise(job.module, job.control)
    if job.control.pipeline == 0:
        with undisturbed(), fork_rng([] if job.device.type == "cpu" else [job.device]):
            self_check(job, captured, plan, batch, transport)


def _wanted(job: Job, plan: Plan) -> bool:
    wanted = job.options.self_check
    if wanted == "auto":
        wanted = sum(parameter.numel() for parameter in job.module.parameters()) < SMALL
    reasons = [reason for reason in job.control.gather(refuses_check(job.module, plan)) if reason]
    if wanted and reasons and job.control.rank == 0:
        job.host.inform(f"The self-check (strategy.self_check) is skipped: {reasons[0]}.")
    return bool(wanted) and not reasons


def samples_of(plan: Plan, batch_size: int) -> int:
    """Number of samples of the micro-batch to compare; every stage takes it undivided."""
    return min(batch_size, *(stage.micro_batch_size for stage in plan.stages))


def self_check(job: Job, captured: Capture | Declared, plan: Plan, batch: Any, transport: Transport) -> None:
    """Compare split and unsplit model on the first samples of `batch`. All ranks of one pipeline call this together.

    Args:
        job: the job, while every rank still has all parameters.
        captured: the training step.
        plan: the step's stages.
        batch: a mini-batch; used only on the rank that runs the step.
        transport: transport to the other devices.

    Raises:
        SelfCheckError: on all ranks, naming what differs.
    """
    control, samples = job.control, samples_of(plan, captured.batch_size)
    part = slice_batch(batch, 0, samples, captured.batch_size) if control.runs_step else None
    whole, split = _copy(job.module, job.device), _copy(job.module, job.device)
    placement = Placement({name: tuple(range(control.num_devices)) for name in tensors_of(job.module)})
    # torch.compile does not work under a dispatch mode, and remembers that for functions compiled there
    with torch.compiler.set_stance("force_eager"), Neutral():  # type: ignore[no-untyped-call]
        expected = _unsplit(job, whole, captured, plan, part, samples) if control.runs_step else {}
        session = Session(job, capture=captured, plan=plan, module=split, placement=placement, transport=transport)
        actual = _split(job, session, split, part, samples)
    difference = _compare(whole, control, expected, actual, TOLERANCES[job.precision], job.device)
    verdict = control.share_object(difference if control.runs_step else None)
    if verdict:
        raise SelfCheckError(verdict)


def _copy(module: nn.Module, device: torch.device) -> nn.Module:
    copied = private_copy(module)
    if hasattr(copied, "log_dict"):
        vars(copied).update(log=_ignore, log_dict=_ignore)
        set_trainer(copied, trainer_of(module))
    return copied.to(device)


def _ignore(*_: Any, **__: Any) -> None:
    """Replaces logging during the check."""


def _invocation(job: Job, module: nn.Module) -> Invocation:
    function = getattr(module, TRAINING)
    return Invocation(function=function, rest=step_arguments(function, 0), around=job.host.around(TRAINING))


def _unsplit(
    job: Job, whole: nn.Module, captured: Capture | Declared, plan: Plan, part: Any, samples: int
) -> dict[str, Any]:
    step = build(captured, plan, whole).step
    step.begin(part, _invocation(job, whole), seed=0)
    with torch.enable_grad():
        loss = loss_of(step.whole(MicroBatch(0, 0, samples, samples)))
    step.end()
    loss.backward()
    return {"loss": loss.item(), "projections": _projections(whole), "norms": _norms(whole)}


def _split(job: Job, session: Session, split: nn.Module, part: Any, samples: int) -> dict[str, Any]:
    outputs = session.run(part, _invocation(job, split), samples, loss_weight=1.0 / samples, step=0)
    loss = loss_of(outputs[0][1]).item() if outputs else 0.0
    return {"loss": loss, "projections": _projections(split)}


def _projections(module: nn.Module) -> Tensor:
    """Products of each parameter's gradient with fixed random vectors: (parameters, PROJECTIONS) float64."""
    rows = []
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        row = torch.zeros(PROJECTIONS, dtype=torch.float64)
        if parameter.grad is not None:
            gradient = parameter.grad.detach().double().flatten().cpu()
            for number in range(PROJECTIONS):
                row[number] = gradient @ torch.randn(gradient.numel(), generator=generator, dtype=torch.float64)
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, PROJECTIONS, dtype=torch.float64)


def _norms(module: nn.Module) -> list[float]:
    return [0.0 if p.grad is None else p.grad.double().norm().item() for p in module.parameters()]


def _compare(
    module: nn.Module,
    control: Control,
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    tolerance: float,
    device: torch.device,
) -> str:
    """A description of the differences on the rank that runs the step; empty elsewhere, and if there are none."""
    total = found["projections"].to(device)
    dist.all_reduce(total, group=control.mesh.pipeline_group)
    if not control.runs_step:
        return ""
    if abs(found["loss"] - expected["loss"]) > tolerance * max(abs(expected["loss"]), 1.0):
        return _message(f"the loss is {found['loss']:.9g} split and {expected['loss']:.9g} unsplit")
    scale = max(expected["norms"], default=0.0)
    names = [name for name, _ in module.named_parameters()]
    errors = (total.cpu() - expected["projections"]).abs().amax(dim=1).tolist()
    wrong = [
        name
        for name, error, norm in zip(names, errors, expected["norms"], strict=True)
        if error > 5 * tolerance * max(norm, 1e-3 * scale, 1e-12)
    ]
    return _message(f"the gradients of {len(wrong)} parameters differ, first {wrong[:5]}") if wrong else ""


def _message(what: str) -> str:
    return (
        f"The split model does not compute the same as the unsplit model: {what}, for one micro-batch and the same "
        "weights. A wrong model would be trained, so training was not started. Likely causes: a forward that keeps "
        "state between calls, or draws random numbers by other means than torch. Put the module that does it into one "
        "stage (strategy.stages); or switch the check off with strategy.self_check=false if the difference is "
        "intended."
    )
