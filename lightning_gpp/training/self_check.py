"""Before training: one micro-batch through the pipeline and the whole model must give one loss and one gradient.

Catches what no shape check can: a model that a cut changed, a value sent to the wrong stage, a weight that is no longer
tied. Works on copies, so that the user's module, metrics and random numbers stay as they are.

Gradients are compared by random projections: each rank projects its part, and projections of parts sum to the
projection of the whole.
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
"""Parameters up to which a model is checked without being asked."""

PROJECTIONS: Final = 3
TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative to the gradient's norm. Wide for low precision: what is looked for are wrong models, not rounding."""


def refuses_check(module: nn.Module, plan: Plan) -> str:
    """Why a comparison would fail although all is well; empty if it may be made."""
    replicated = any(len(stage.devices) > 1 for stage in plan.stages)
    if replicated and any(isinstance(part, BatchNorm) for part in module.modules()):
        return "BatchNorm in replicated stages normalises each replica's share by itself"
    if any(parameter.is_meta for parameter in module.parameters()):
        return "the model is on the meta device"
    return ""


def check_first(job: Job, captured: Capture | Declared, plan: Plan, batch: Any, transport: Transport) -> None:
    """Compare split and unsplit on the first pipeline if the user wants it and it can be done. All ranks call this.

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
        job.host.inform(f"The self-check (strategy.self_check) is left out: {reasons[0]}.")
    return bool(wanted) and not reasons


def samples_of(plan: Plan, batch_size: int) -> int:
    """Samples of the micro-batch that is compared: every stage takes it whole."""
    return min(batch_size, *(stage.micro_batch_size for stage in plan.stages))


def self_check(job: Job, captured: Capture | Declared, plan: Plan, batch: Any, transport: Transport) -> None:
    """Compare split and unsplit on the first samples of `batch`. All ranks of one pipeline call this together.

    Args:
        job: of a module whose parameters are still on every rank.
        captured: the training step.
        plan: its stages.
        batch: on the rank that runs the step; ignored elsewhere.
        transport: to the other devices.

    Raises:
        SelfCheckError: on all ranks, naming what differs.
    """
    control, samples = job.control, samples_of(plan, captured.batch_size)
    part = slice_batch(batch, 0, samples, captured.batch_size) if control.runs_step else None
    whole, split = _copy(job.module, job.device), _copy(job.module, job.device)
    placement = Placement({name: tuple(range(control.num_devices)) for name in tensors_of(job.module)})
    # torch.compile does not work in a mode of dispatch, and remembers that for what it was asked to compile there
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
    """Logging during the check reaches nobody."""


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
    """For every parameter the products of its gradient with fixed random vectors: (parameters, PROJECTIONS) float64."""
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
    """A description of the differences on the rank that runs the step; empty elsewhere, and if all agrees."""
    total = found["projections"].to(device)
    dist.all_reduce(total, group=control.mesh.pipeline_group)
    if not control.runs_step:
        return ""
    if abs(found["loss"] - expected["loss"]) > tolerance * max(abs(expected["loss"]), 1.0):
        return _message(f"the loss is {found['loss']:.9g} split and {expected['loss']:.9g} whole")
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
        f"The split model does not compute what the whole model computes: {what}, for one micro-batch and the same "
        "weights. Training would go on with a wrong model, so it was not started. Likely causes: a forward that keeps "
        "state between calls, or draws random numbers by other means than torch. List the module that does it in one "
        "stage (strategy.stages); or switch the check off by strategy.self_check=false if the difference is meant."
    )
