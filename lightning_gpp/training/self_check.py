"""Before training: one micro-batch through the pipeline and the whole model must give one loss and one gradient.

Catches what no shape check can: a model that a cut changed, a value sent to the wrong stage, a weight that is no longer
tied. Works on copies, so that the user's module, metrics and random numbers stay as they are.

Gradients are compared by random projections: each rank projects its part, and projections of parts sum to the
projection of the whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp._compat.lightning_module import set_trainer, trainer_of
from lightning_gpp._compat.torch import BatchNorm
from lightning_gpp.capture import Capture, slice_batch
from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.errors import SelfCheckError
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.neutral import Neutral
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.stages import build
from lightning_gpp.stages.declared import Declared
from lightning_gpp.stages.step import loss_of
from lightning_gpp.training.control import Control
from lightning_gpp.training.session import Session

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


def samples_of(plan: Plan, batch_size: int) -> int:
    """Samples of the micro-batch that is compared: every stage takes it whole."""
    return min(batch_size, *(stage.micro_batch_size for stage in plan.stages))


def self_check(
    module: nn.Module,
    captured: Capture | Declared,
    plan: Plan,
    batch: Any,
    *,
    control: Control,
    call: Callable[[nn.Module, Any], Any],
    session: Callable[[nn.Module], Session],
    device: torch.device,
    precision: torch.dtype,
) -> None:
    """Compare split and unsplit on the first samples of `batch`. All ranks of one pipeline call this together.

    Args:
        module: the whole module, its parameters still on every rank.
        batch: on the rank that runs the step; ignored elsewhere.
        call: `call(module, samples)` runs the user's step of a module, in its context.
        session: makes the session of a module.
        precision: of the computation, for the tolerance.

    Raises:
        SelfCheckError: on all ranks, naming what differs.
    """
    samples = samples_of(plan, captured.batch_size)
    part = slice_batch(batch, 0, samples, captured.batch_size) if control.runs_step else None
    whole, split = _copy(module, device), _copy(module, device)
    # torch.compile does not work in a mode of dispatch, and remembers that for what it was asked to compile there
    with torch.compiler.set_stance("force_eager"), Neutral():  # type: ignore[no-untyped-call]
        expected = _unsplit(whole, captured, plan, part, samples, call) if control.runs_step else {}
        found = _split(split, session, part, samples, call)
    difference = _compare(whole, control, expected, found, TOLERANCES[precision], device)
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


def _unsplit(
    whole: nn.Module,
    captured: Capture | Declared,
    plan: Plan,
    part: Any,
    samples: int,
    call: Callable[[nn.Module, Any], Any],
) -> dict[str, Any]:
    step = build(captured, plan, whole).step
    step.begin(part, lambda batch: call(whole, batch), seed=0)
    with torch.enable_grad():
        loss = loss_of(step.whole(MicroBatch(0, 0, samples, samples)))
    step.end()
    loss.backward()
    return {"loss": loss.item(), "projections": _projections(whole), "norms": _norms(whole)}


def _split(
    split: nn.Module,
    session: Callable[[nn.Module], Session],
    part: Any,
    samples: int,
    call: Callable[[nn.Module, Any], Any],
) -> dict[str, Any]:
    outputs = session(split).run(part, lambda batch: call(split, batch), samples, loss_weight=1.0 / samples, step=0)
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
    """What differs, on the rank that runs the step; empty elsewhere, and where all agrees."""
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
