"""The self-check before training: the split and the unsplit model must give the same loss and gradient for a
micro-batch.

It catches errors that no shape check can: a model that a cut changed, a value sent to the wrong stage, a weight that is
no longer tied. It works on copies, so that the user's module, metrics and random numbers do not change.

Gradients are compared by random projections: each rank projects its part, and the projections of parts add up to that
of the full gradient. The first device needs memory for the undivided model and its gradient, other devices for their
stages; the time is that of a micro-batch on the pipeline, and of one and two small ones on the first device.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.random import fork_rng

from lightning_gpp._compat.torch import BatchNorm
from lightning_gpp.capture import Capture, slice_batch
from lightning_gpp.capture.batch import UNCOUNTED, cut_note, loose_rows
from lightning_gpp.capture.captured import loss_of, trained_loss
from lightning_gpp.capture.kept import groups_of_optimizers, unchanged
from lightning_gpp.errors import CaptureError, GPPError, IndivisibleError, SelfCheckError
from lightning_gpp.explained import without_name
from lightning_gpp.measure.memory import free_bytes
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.named_tensors import tensors_of
from lightning_gpp.runtime.random import Neutral, RandomStreams, undisturbed
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.runtime.transport import Transport
from lightning_gpp.stages import build
from lightning_gpp.stages.build import Captured, Undivided
from lightning_gpp.stages.counts import counted
from lightning_gpp.stages.step import Invocation, StepRunner
from lightning_gpp.training.checks.copies import given_arguments, silent_copy
from lightning_gpp.training.checks.results import differing, forget_vectors, norms, projections
from lightning_gpp.training.checks.undivided import (
    OFF,
    CutComparison,
    difference,
    divided_samples,
    few_samples,
    normalises,
    tried,
)
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.batches import outline
from lightning_gpp.training.host import TRAINING, Job
from lightning_gpp.training.options import Options
from lightning_gpp.training.session import DATA_STREAM, Session
from lightning_gpp.training.tensors.parameters import Layout, bytes_of, place
from lightning_gpp.training.tensors.replicas import Site
from lightning_gpp.training.whole.whole_step import capture_whole, check_whole
from lightning_gpp.user_code import UNKNOWN, line_of
from lightning_gpp.wording import counted as counted_in
from lightning_gpp.wording import described

log = logging.getLogger(__name__)


def refuses_check(job: Job, plan: Plan) -> str:
    """Why this rank cannot compare; empty if it can."""
    if any(tensor.is_meta for tensor in tensors_of(job.module).values()):
        return (
            "this rank does not have all parameters and buffers (they are on the meta device, or were given to others)"
        )
    if not job.control.runs_step or job.options.self_check is True:
        return ""
    needed, free = 2 * bytes_of(job.module), free_bytes(job.device)
    if needed > free:
        return f"the undivided model and its gradient take {needed / 1e9:.1f} GB, and {job.device} has {free / 1e9:.1f}"
    return ""


Findings = tuple[Mapping[str, str], bool]
"""The combination of logged values of micro-batches, if not as those of batches, by name; and whether the network
calls of a step as a whole have other results in micro-batches.
"""


def check_first(job: Job, captured: Captured, plan: Plan, batch: Any, transport: Transport) -> Job:
    """Compare split and unsplit model on the first pipeline if the user wants it and it is possible. All ranks call
    this.

    Returns:
        The job; network calls that differ in micro-batches are not cut.

    Raises:
        IndivisibleError: on all ranks of all pipelines.
        SelfCheckError: see `self_check`.
    """
    if captured.step != TRAINING or isinstance(captured, Undivided) or not _wanted(job, plan):
        return job
    outcome: Findings | IndivisibleError = ({}, False)
    if job.control.pipeline == 0:
        generators = fork_rng([] if job.device.type == "cpu" else [job.device])
        with undisturbed(), generators, unchanged(groups_of_optimizers(job.module)):
            try:
                outcome = self_check(job, captured, _comparable(job, captured, plan), batch, transport)
            except IndivisibleError as error:
                outcome = error
        forget_vectors()
    outcome = job.control.broadcast(outcome)
    if isinstance(outcome, IndivisibleError):
        raise outcome
    combined, calls_differ = outcome
    job.host.combine(combined)
    return replace(job, cuts_calls=job.cuts_calls and not calls_differ)


def _wanted(job: Job, plan: Plan) -> bool:
    wanted = job.options.self_check is not False
    reasons = [reason for reason in job.control.gather_all(refuses_check(job, plan)) if reason]
    if wanted and reasons and job.control.first:
        job.host.inform(f"The self-check (strategy.self_check) is skipped: {reasons[0]}.")
    return wanted and not reasons


def _comparable(job: Job, captured: Capture, plan: Plan) -> Plan:
    """The plan without stage replicas if there is BatchNorm, which normalises each replica's share by itself; and
    without micro-batches if network calls of a step as a whole are not cut, as they mix samples.
    """
    replicated = any(len(stage.devices) > 1 for stage in plan.stages)
    normalised = replicated and any(isinstance(part, BatchNorm) for part in job.module.modules())
    uncut = job.whole and captured.graph.mixes_samples
    if not normalised and not uncut:
        return plan
    sizes: dict[str, Any] = {"micro_batch_size": captured.batch_size} if uncut else {}
    stages = tuple(replace(stage, devices=stage.devices[:1], round_robin=False, **sizes) for stage in plan.stages)
    unused = set(range(plan.num_devices)) - {stage.devices[0] for stage in stages}
    return replace(plan, stages=stages, schedule="gpipe", unused=tuple(sorted(unused)), sharding="none", period=0)


def samples_of(plan: Plan, batch_size: int) -> int:
    """Number of samples of the micro-batch to compare; every stage takes it undivided."""
    return min(batch_size, *(stage.micro_batch_size for stage in plan.stages))


def self_check(job: Job, captured: Capture, plan: Plan, batch: Any, transport: Transport) -> Findings:
    """Compare split and unsplit model on the first samples of `batch`. All ranks of one pipeline call this together.

    Warns if the same samples, undivided, have another loss than in micro-batches.

    Args:
        job: the job, while every rank still has all parameters.
        captured: the training step.
        plan: the step's stages.
        batch: a mini-batch; used only on the rank that runs the step.
        transport: transport to the other devices.

    Returns:
        What was found on the rank that runs the step.

    Raises:
        IndivisibleError: on all ranks: the step cannot run on these samples, or may give them rows of others.
        SelfCheckError: on all ranks, naming what differs.
    """
    control, samples = job.control, samples_of(plan, captured.batch_size)
    part = None
    if control.runs_step and job.division is not None:
        part = job.division.parts(batch)[0]
    elif control.runs_step:
        part = slice_batch(batch, 0, samples, captured.batch_size, captured.dims)
    expected, warning = Expected(), ""
    failure: IndivisibleError | None = None
    combined: Mapping[str, str] = {}
    told: list[str] = []
    # torch.compile does not work under a dispatch mode, and remembers that for functions compiled there
    with torch.compiler.set_stance("force_eager"), Neutral():  # type: ignore[no-untyped-call]
        if control.runs_step:
            whole = silent_copy(job.module, job.device)
            expected, failure = _unsplit_or_failure(job, whole, captured, plan, part, batch)
            if failure is None:
                step = build(captured, plan, whole).step
                if (comparison := _comparison(job, step, captured, plan, batch, expected.dtype)) is not None:
                    warning = difference(comparison, told.append)
                    combined = comparison.combined
                rows = loose_rows(batch, captured.dims) if warning and not job.whole and job.division is None else {}
                if rows:
                    failure = IndivisibleError(_rows_of_others(rows, captured.batch_size, warning))
            del whole
        if failure := _anywhere(control, failure):
            raise failure
        actual, stages = _split(job, captured, plan, transport, part, samples)
    found = _compare(job, stages, expected, actual, TOLERANCES[least_precise(job, captured, expected.dtype)])
    works = partial(_whole_works, job, batch)
    if warning and not found:
        control.warn(warning if job.whole else tried(warning, works))
    for text in told:
        (job.host.inform if control.first else log.info)(tried(text, works))
    if verdict := _anywhere(control, tried(found, works)):
        raise SelfCheckError(verdict)
    return combined, job.whole and bool(warning) and not normalises(job.module)


def _rows_of_others(rows: Mapping[str, int], samples: int, difference: str) -> str:
    """The refusal of a batch with rows of which nobody says whose they are."""
    name, count = next(iter(rows.items()))
    return (
        f"{name!r} has {counted_in(count, 'row')} for {counted_in(samples, 'sample')}. If they belong to samples, such "
        f"as several images to each, say which are whose by strategy.batch_rows={{{name}: ...}}; if every micro-batch "
        f"needs all of them, say strategy.batch_dims={{{name}: null}}. {difference.removesuffix(OFF).strip()}"
    )


def _anywhere(control: Control, found: Any) -> Any:
    """The finding of a rank which runs the step, on all ranks of the pipeline; None if there is none."""
    shared = control.share_object(found if control.runs_step else None)
    return next(filter(None, control.gather_in_device(shared)), None)


@dataclass(frozen=True, slots=True)
class Expected:
    """Loss and gradient of one side of the comparison; `norms`, and `dtype` of the loss, of the unsplit one only."""

    loss: float = 0.0
    projections: Tensor = field(default_factory=lambda: torch.zeros(0))
    norms: list[float] = field(default_factory=list)
    dtype: torch.dtype = torch.float64


def _invocation(job: Job, captured: Capture, module: nn.Module) -> Invocation:
    function, rest = captured.called_on(module)
    by = None if job.whole else counted(job.options.loss_reduction)
    return Invocation(function=function, rest=rest, around=job.host.around(TRAINING), counted=by)


def _unsplit_or_failure(
    job: Job, whole: nn.Module, captured: Capture, plan: Plan, part: Any, batch: Any
) -> tuple[Expected, IndivisibleError | None]:
    samples, total = samples_of(plan, captured.batch_size), captured.batch_size
    try:
        return _unsplit(job, whole, captured, plan, part, samples), None
    except CaptureError as error:  # the step skips this mini-batch
        return Expected(), IndivisibleError(without_name(str(error)))
    except GPPError:
        raise
    except Exception as error:  # user code, which may fail on fewer samples than it is written for
        told, line = f"in one process, too: {described(error)}", line_of(error)
        if job.division is None:
            try:
                _unsplit(job, whole, captured, plan, batch, total)
            except Exception as again:
                if line_of(again) == line and (line != UNKNOWN or type(again) is type(error)):
                    failure = IndivisibleError(f"The training step fails on a mini-batch, {told} ({line}).")
                    failure.undivided = True
                    return Expected(), failure
        cut = "" if captured.dims == UNCOUNTED else f" {cut_note(part, captured.dims)}"
        return Expected(), IndivisibleError(
            f"The training step fails on a micro-batch, the first {samples} of {total} samples, {told} ({line}).{cut} "
            "If that is wrong, say it by strategy.batch_dims; a step that needs all samples gets them by "
            "strategy.num_micro_batches=1."
        )


def _unsplit(job: Job, whole: nn.Module, captured: Capture, plan: Plan, part: Any, samples: int) -> Expected:
    step = build(captured, plan, whole).step
    streams = RandomStreams(job.seed)  # what the step draws from Python and NumPy is what it draws in stages
    step.begin(part, _invocation(job, captured, whole), streams.key(DATA_STREAM, job.control.pipeline, 0, 0))
    with torch.enable_grad():
        loss = trained_loss(step.whole(MicroBatch(0, 0, samples, samples)))
    step.end()
    loss.backward()
    return Expected(loss.item(), projections(whole), norms(whole), loss.dtype)


def _comparison(
    job: Job, step: StepRunner, captured: Capture, plan: Plan, batch: Any, dtype: torch.dtype
) -> CutComparison | None:
    if job.whole and captured.graph.mixes_samples:  # then network calls are not cut
        return None
    precision = least_precise(job, captured, dtype)
    if job.division is not None:
        undivided, parts = divided_samples(job.division, batch)
    else:
        undivided, parts = few_samples(plan, batch, captured.batch_size, captured.dims)
    return CutComparison(
        module=step.module,
        step=step,
        invocation=_invocation(job, captured, step.module),
        undivided=undivided,
        parts=parts,
        sums=job.options.loss_reduction == "sum" and not job.whole,
        tolerance=TOLERANCES[precision],
        epsilon=torch.finfo(precision).eps,
        of_calls=job.whole,
    )


def _whole_works(job: Job, batch: Any) -> bool:
    """True if the step can run as a whole on this mini-batch."""
    if job.whole:
        return False
    job = replace(job, whole=True)
    try:
        check_whole(job.options)
        captured, found = capture_whole(job, outline(batch))
        used = {name for operator in captured.graph for name in (*operator.parameters, *operator.buffers)}
        if job.control.num_devices > 1 and found.states & used:  # see check_states
            return False
        given_arguments(job, found, batch)
        return True
    except Exception as error:  # refused, or user code on copies
        log.info("strategy.step=whole was tried, and refused: %s", error)
        return False


def _split(
    job: Job, captured: Capture, plan: Plan, transport: Transport, part: Any, samples: int
) -> tuple[Expected, dict[str, set[str]]]:
    """Loss and gradient of this rank's stages; and the parameters of all stages, by stage."""
    control = job.control
    built = build(captured, plan, job.module)
    used = [{*p, *b} for p, b in zip(built.parameters, built.buffers, strict=True)]
    split = silent_copy(job.module, job.device, place(job.module, plan, used).elsewhere(control))
    everywhere = dict.fromkeys(tensors_of(job.module), tuple(range(control.num_devices)))
    if job.parallel is not None:
        job.parallel.divide(split)
    site = Site(job=job, layout=Layout(plan=plan, devices=everywhere), transport=transport)
    session = Session(site, capture=captured, plan=plan, module=split)
    outputs = session.run(part, _invocation(job, captured, split), samples, loss_weight=1.0 / samples, step=0)
    loss = loss_of(outputs[0][1]).item() if outputs else 0.0
    if job.parallel is not None:
        job.parallel.undivide(split)
    return Expected(loss, projections(split)), {s.name: names for s, names in zip(plan.stages, used, strict=True)}


def _compare(job: Job, stages: Mapping[str, set[str]], expected: Expected, actual: Expected, tolerance: float) -> str:
    """A description of the differences on the rank that runs the step; empty elsewhere, and if there are none."""
    total = actual.projections.to(job.device) * (job.control.member == 0)  # every device counts once
    dist.all_reduce(total, group=job.control.mesh.pipeline_group)
    if not job.control.runs_step:
        return ""
    if abs(actual.loss - expected.loss) > tolerance * max(abs(expected.loss), 1.0):
        return _message(job.options, f"the loss is {actual.loss:.9g} split and {expected.loss:.9g} unsplit")
    names = [name for name, _ in job.module.named_parameters()]
    places = differing(total.cpu(), expected.projections, expected.norms, tolerance)
    wrong = [names[place] for place in places]
    where = [stage for stage, used in stages.items() if used & set(wrong)]
    if not wrong:
        return ""
    return _message(
        job.options, f"the gradients of {len(wrong)} parameters differ, in stages {where}, first {wrong[:5]}"
    )


def _message(options: Options, what: str) -> str:
    cause = (
        "Likely causes: a forward that keeps state between calls, or draws random numbers by other means than torch; a "
        "step that depends on what it changes outside of the module, such as a global variable. Keep state in "
        "attributes of the module."
    )
    if options.local_losses:
        cause = "With strategy.local_losses, the step may only add these losses. Weigh them in their modules."
    if options.slicing is not None:
        cause = (
            "With strategy.slices, tokens may depend on earlier ones by lightning_gpp.sequence alone, and on no later "
            "ones. Leave the modules in which they do out of strategy.slice_modules."
        )
    return (
        f"The split model does not compute the same as the unsplit model: {what}, for one micro-batch and the same "
        f"weights. A wrong model would be trained, so training was not started. {cause}"
    )


TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Tolerances relative to the gradient's norm; wide for low precision, as wrong models are sought, not rounding."""


def least_precise(job: Job, captured: Captured, loss: torch.dtype) -> torch.dtype:
    """The least precise type that gradients pass through, with that of the loss; modules may compute in another type
    than that of their parameters.
    """
    specs = (spec for operator in captured.graph for spec in operator.outputs)
    kinds = {getattr(torch, spec.dtype) for spec in specs if spec.requires_grad}
    known = {rounded_to(kind, job.device, job.module) for kind in {job.precision, loss, *kinds} & set(TOLERANCES)}
    return max(known, key=TOLERANCES.__getitem__, default=torch.float64)


def rounded_to(dtype: torch.dtype, device: torch.device, module: nn.Module) -> torch.dtype:
    """The type with the precision in which a module multiplies numbers of a type on a device.

    GPUs may round float32 to TF32, which has as many bits as float16. In convolutions and recurrent networks torch lets
    them, unless told otherwise.
    """
    return torch.float16 if dtype is torch.float32 and device.type == "cuda" and _has_tf32(module) else dtype


_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _has_tf32(module: nn.Module) -> bool:
    """True if a kind of layer of the module may be rounded to TF32."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    settings = (products, nn.Module), (cudnn.conv, _CONVOLUTIONS), (cudnn.rnn, nn.RNNBase)  # type: ignore[attr-defined]
    parts = list(module.modules())
    return any(
        setting.fp32_precision == "tf32" and any(isinstance(part, kind) for part in parts) for setting, kind in settings
    )
