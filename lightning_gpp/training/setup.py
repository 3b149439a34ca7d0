"""The set-up of a run: builds an engine from a module and one mini-batch.

capture the step  ->  plan on rank 0, for all  ->  agree on it  ->  connect the devices  ->  check one micro-batch
                  ->  keep this rank's parameters, and their part of the optimizers  ->  engine
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from lightning_gpp._compat.lightning_module import set_device
from lightning_gpp.capture import Capture
from lightning_gpp.capture.batch import GUESSED, counting_note
from lightning_gpp.capture.calls import StepCalls
from lightning_gpp.checkpoints.pretrained import pretrained_values
from lightning_gpp.costs.model import Footprint
from lightning_gpp.errors import (
    ConfigError,
    GPPError,
    IndivisibleError,
    MicroBatchesError,
    PlanError,
    SelfCheckError,
)
from lightning_gpp.plan import WHOLE, Plan
from lightning_gpp.planning.search import REMARK
from lightning_gpp.reports import plan_table, terminal_width
from lightning_gpp.reports.terminal import SEARCHING, working, wrapped
from lightning_gpp.runtime.concurrent import Streams
from lightning_gpp.runtime.cuda import recorder_of, streams_on
from lightning_gpp.runtime.recorded import Recording
from lightning_gpp.runtime.recorded_stage import Recorder
from lightning_gpp.runtime.transport import DistributedTransport, pairs_of
from lightning_gpp.runtime.weights import WeightPolicy, Weights, make_policy
from lightning_gpp.stages import build
from lightning_gpp.stages.build import Captured, Undivided
from lightning_gpp.stages.division import Division
from lightning_gpp.stages.rows import known_rows
from lightning_gpp.training.asynchronous import Asynchronous
from lightning_gpp.training.checks.copies import comparison
from lightning_gpp.training.checks.self_check import check_first
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.batches import Feed, outline
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.host import TRAINING, Job
from lightning_gpp.training.measured.machine import JobMachine, simulated
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.options import Options
from lightning_gpp.training.planner import part_of_member, plan_for
from lightning_gpp.training.sessions import (
    Sessions,
    UncapturedError,
    as_captured,
    captured_in,
    compile_blocks,
    steps_as_whole,
)
from lightning_gpp.training.tensors.joining import check_alike, facts_of_optimizers, facts_of_tensors
from lightning_gpp.training.tensors.parameters import Layout, equalise, move, place, settle
from lightning_gpp.training.tensors.replicas import Replicas, Site, check_no_hooks
from lightning_gpp.training.updates.gradients import FiniteCheck, StageGradients
from lightning_gpp.training.updates.optimizers import OptimizerIndex, check_first_order
from lightning_gpp.training.whole.whole_step import (
    WholeStep,
    can_run_whole,
    check_states,
    made_for_whole,
    may_evaluate_whole,
    noted_whole,
    ordered_for,
    why_whole,
)

log = logging.getLogger(__name__)

NO_FORM: Final = -1
"""The form of mini-batches of a step as a whole, whose capture is not that of any step."""


def set_up(job: Job, incoming: Incoming, batch: Any, *, step: str = TRAINING, **given: Any) -> Engine:
    """Build the engine of a run, see `_set_up`; if the step cannot run on micro-batches, for one as a whole.

    All ranks call this together.
    """
    job = _with_known_rows(job, incoming, batch, step)
    may_run_whole = can_run_whole(job)
    if step == TRAINING and may_run_whole and made_for_whole(job.options.plan):
        return _set_up(replace(job, whole=True, evaluates_whole=True), incoming, batch, step=step, **given)
    try:
        return _set_up(job, incoming, batch, step=step, **given)
    except (UncapturedError, IndivisibleError) as error:
        refused: GPPError = error.error if isinstance(error, UncapturedError) else error
    except PlanError as error:  # the stages of a step that calls them one by one need not be a pipeline
        plan = job.known or job.options.plan
        if step == TRAINING or plan is None or not made_for_whole(plan):
            raise
        refused, may_run_whole = error, may_evaluate_whole(job.options, plan)
    if job.options.example_batch is not None:
        refused.args = (f"{refused} strategy.example_batch is what the step was given.",)
    if not may_run_whole or (isinstance(refused, IndivisibleError) and refused.undivided):
        raise refused  # outside of the handler, whose error would be its context, of which it is the cause
    return _set_up_whole(refused, job, incoming, batch, step=step, **given)


def _with_known_rows(job: Job, incoming: Incoming, batch: Any, step: str) -> Job:
    """The job that gives rows to their samples, if the layout of the mini-batch says which are whose."""
    options, found = job.options, None
    if step == TRAINING and job.control.first and job.division is None and options.step == "auto" and not job.whole:
        with suppress(ConfigError):  # other options may not go together with it
            found = replace(options, batch_rows=known_rows(job.module, batch) or None)
    rows = job.control.broadcast(found and found.batch_rows)
    if not rows:
        return job
    if job.control.first:
        job.host.inform(f"Micro-batches get the images of their samples: strategy.batch_rows={dict(rows)}.")
    job = replace(job, options=replace(options, batch_rows=rows))
    incoming.count_by(job.options.batch_dims)
    return job


def _set_up_whole(refused: GPPError, job: Job, *arguments: Any, step: str, **given: Any) -> Engine:
    """Build the engine of a step as a whole, because of what refused micro-batches; raise that if it cannot be."""
    try:
        engine = _set_up(replace(job, whole=True, evaluates_whole=True), *arguments, step=step, **given)
    except (UncapturedError, ConfigError, PlanError, SelfCheckError) as error:
        same_place = str(error).partition(": ")[0] == str(refused).partition(": ")[0]  # at the same line
        same = same_place or type(error) is type(refused) is IndivisibleError
        why = "for the same reason." if same else f"too: {error}"
        refused.args = (f"{refused} The step was tried as a whole (strategy.step=whole), and refused, {why}",)
        raise refused from None
    job.control.warn(why_whole(refused, step, alone=job.control.num_devices == 1))
    return engine


def _set_up(
    job: Job,
    incoming: Incoming,
    batch: Any,
    *,
    step: str = TRAINING,
    optimizers: Sequence[Optimizer] = (),
    footprint: Footprint | None = None,
    num_steps: int = 0,
    calls: StepCalls | None = None,
) -> Engine:
    """Build the engine of a run.

    Args:
        job: the job of the run.
        incoming: announces mini-batches.
        batch: an example mini-batch; used only on global rank 0.
        step: name of the method that the plan is for.
        optimizers: optimizers of the full module; afterwards they step this rank's part. None without training.
        footprint: memory of a device per byte of parameters, for planning.
        num_steps: number of mini-batches trained earlier, from which random streams continue.
        calls: the network calls of a step as a whole; by default they are found in the module's training step.

    Raises:
        UncapturedError, PlanError, ConfigError: the module cannot be trained in stages, or not with these options.
        IndivisibleError: the step fails on a micro-batch.
        SelfCheckError: the stages do not compute the same as the module.
        GPPError: the ranks do not agree on what they captured, or on what they train with.
    """
    set_device(job.module, job.device)  # before the step runs for the first time, which may read it
    if job.options.compile:
        compile_blocks(job.module)
    recorder = _recorder(job) if step == TRAINING else None
    if step == TRAINING and job.control.num_processes > 1:
        facts = {**facts_of_tensors(job.module), **facts_of_optimizers(optimizers), **job.host.facts()}
        check_alike(facts, job.control.everyone)
    policy = _weight_policy(job.options, optimizers) if step == TRAINING else None
    division = job.division if step == TRAINING else None
    parts = list[Any]()

    def divide(division: Division) -> int:
        division.check(batch)
        parts.extend(division.parts(batch))
        return len(parts)

    number = None if division is None else job.control.from_first(partial(divide, division))
    example = job.control.from_first(lambda: outline(parts[0] if parts else batch))
    alone = partial(job.control.mesh.peers, alone=True)  # for runs of the step, which only some ranks make
    with alone():
        captured, found_calls = captured_in(job, step, example, calls)
    if number is not None and isinstance(captured, Capture):
        captured = replace(captured, batch_size=captured.batch_size * number, cut="")
    job = as_captured(job, step, captured, optimizers)
    form = NO_FORM if job.whole else incoming.form_of(example, job.dims_in(step))
    if isinstance(captured, Capture):
        incoming.depend_on(captured.decided, example, captured.dims)
    batch = job.in_device(batch) if job.control.rank == 0 else batch
    machine = JobMachine(job, footprint or Footprint(), captured)
    make_plan = partial(_planned, job, captured, parts[0] if parts else batch, machine, number)
    plan = noted_whole(job.control.from_first(make_plan), job.whole)
    if job.division is not None:
        _check_undivided(plan)
    facts = {"the captured step": str(captured.fingerprint), "the plan (strategy.plan)": str(plan)}
    check_alike(facts, job.control.everyone)
    notes = list[str]()
    if division is not None and parts:
        there = machine.look()
        timeline = partial(simulated, plan, there.part(captured.graph), there, job.control.num_pipelines)
        notes.append(division.note(batch, parts, timeline))
    _announce(job, captured, plan, notes)
    transport = _connect(job, plan, "training")
    if found_calls is not None:
        check_states(found_calls, build(captured, plan, job.module), plan)
        with alone():
            batch = comparison(job, found_calls, batch, captured.batch_size) if step == TRAINING else None
    compared = found_calls is None or batch is not None
    equalise(job.module, job.control)
    with job.host.unheard(), alone():
        if compared:
            job = check_first(job, captured, plan, batch, transport)
    if not (job.whole and job.control.num_processes == 1):
        for optimizer in optimizers:
            check_first_order(optimizer)
    indices = [OptimizerIndex(optimizer, job.module) for optimizer in optimizers]
    cut, replicas = not isinstance(captured, Undivided), None
    if step == TRAINING and cut:
        check_no_hooks(job.module, list(job.module.parameters()))  # placed ones may be other tensors
    layout = _place_parameters(job, captured, plan)
    if step == TRAINING:
        replicas = Replicas(job, layout, indices, cut=cut)
    incoming.follow()
    asynchronous = gradients = None
    if policy is not None:
        asynchronous = Asynchronous(job, policy, plan, optimizers=optimizers, num_steps=num_steps)
        gradients = StageGradients(job, layout)
        ahead = asynchronous.ahead
        incoming.feed = Feed(lambda: ahead)
    site = Site(
        job=job,
        layout=layout,
        transport=transport,
        replicas=replicas,
        asynchronous=asynchronous,
        recording=_recording(job, recorder, plan, replicas) if policy is None and step == TRAINING else None,
        streams=_streams(job, plan, replicas) if policy is None else None,
    )
    evaluating = None if asynchronous is None else _connect(job, plan, "evaluation")
    sessions = Sessions(site, incoming, captured=captured, form=form, example=example, evaluating=evaluating)
    return Engine(
        sessions,
        whole=WholeStep(site),
        as_whole=steps_as_whole(job, step),
        indices=indices,
        gradients=gradients,
        finite=FiniteCheck(job, layout, optimizers) if step == TRAINING and asynchronous is None else None,
        machine=machine.look,
        num_steps=num_steps,
    )


def _recorder(job: Job) -> Recorder | None:
    """The recorder of this rank's device; None if it has none, or is not wanted.

    Raises:
        ConfigError: it is demanded without a GPU.
    """
    wanted = job.options.cuda_graphs
    recorder = recorder_of(job.device) if wanted else None
    if wanted is True and recorder is None:
        raise ConfigError(
            "strategy.cuda_graphs=True records what stages launch on GPUs, in memory of torch's native allocator (not "
            f"cudaMallocAsync), and this job computes on {job.device.type}. Use strategy.cuda_graphs=auto."
        )
    return recorder


def _recording(job: Job, recorder: Recorder | None, plan: Plan, replicas: Replicas | None) -> Recording | None:
    """The recording of stages on this rank; None if nothing is recorded."""
    wanted = job.options.cuda_graphs
    reasons = _unrecorded(job, plan, replicas) if wanted else []
    if wanted is True and reasons:
        job.control.warn(f"strategy.cuda_graphs=True records nothing, because {' and '.join(reasons)}.")
    return None if recorder is None or reasons else Recording(recorder=recorder, demanded=wanted is True)


def _unrecorded(job: Job, plan: Plan, replicas: Replicas | None) -> list[str]:
    """Reasons why no stage can be recorded, which options alone do not tell."""
    reasons = {
        "the step runs as a whole": job.whole or plan.stages[plan.step_stage].micro_batch_size == WHOLE,
        "tensor parallelism has messages inside stages": job.parallel is not None,
        "stages move activations to the host": any(stage.offload for stage in plan.stages),
        "stages are slices of sequences": plan.is_sliced,
        "sharding moves parameters between actions": replicas is not None and replicas.sync.gathers,
        "micro-batches have sizes of their own": job.division is not None,
    }
    return [reason for reason, holds in reasons.items() if holds]


def _streams(job: Job, plan: Plan, replicas: Replicas | None) -> Streams | None:
    """The streams of stages that compute at the same time on this rank; None if they do not."""
    gathers = replicas is not None and replicas.sync.gathers
    if job.options.concurrent_stages == 1 or gathers or any(stage.offload for stage in plan.stages):
        return None
    return streams_on(job.device)


def _check_undivided(plan: Plan) -> None:
    """Refuse stages that would cut micro-batches with sizes of their own further.

    Raises:
        PlanError: names the stage.
    """
    size = plan.stages[plan.step_stage].micro_batch_size
    for stage in plan.stages:
        if len(stage.devices) > 1 or stage.micro_batch_size != size:
            raise PlanError(
                f"Stage {stage.name!r} has {len(stage.devices)} replicas and micro-batches of {stage.micro_batch_size} "
                f"samples (the step: {size}). With strategy.micro_batch_by or strategy.batch_rows all stages take the "
                "same micro-batches, undivided: give every stage one device and no micro_batch_size, and use "
                "strategy.num_pipelines for data parallelism."
            )


def agreed_seed(seed: int | None, control: Control) -> int:
    """The seed of the random streams: as given, otherwise drawn by rank 0."""
    return int(control.broadcast(secrets.randbits(62) if seed is None else seed))


def _weight_policy(options: Options, optimizers: Sequence[Optimizer]) -> WeightPolicy | None:
    """The policy of asynchronous training, before anything else takes time: it may refuse the optimizers."""
    if options.weights == SYNCHRONOUS:
        return None
    known = Weights(parameters={}, optimizers=lambda: optimizers)
    return make_policy(options.weights, known, **dict(options.weight_options or {}))


def _planned(job: Job, captured: Captured, batch: Any, machine: JobMachine, number: int | None) -> Plan:
    """The plan, which rank 0 makes for all: searches in other processes may find other plans.

    `number`: of the micro-batches of the mini-batch, if they have sizes of their own; `batch` is one of these then.
    """
    measured = partial(machine.measured, batch)
    subject = captured if isinstance(captured, Undivided) else part_of_member(captured, machine.look())
    options = ordered_for(job.options, job.whole)
    if number is not None:
        options = replace(options, num_micro_batches=number, max_replicas=1)
    try:
        with working(SEARCHING):
            plan = plan_for(subject, options, job.control.num_devices, job.known, measured)
    except MicroBatchesError as error:
        raise MicroBatchesError(f"{error} {counting_note(batch, job.options.batch_dims or GUESSED)}") from error
    if job.options.costs == "measured" and job.known is None and not isinstance(captured, Undivided):
        measured()  # of given stages, too: the predicted times are made of them
    by_hand = "plan" if job.options.plan is not None else "stages" if job.options.stages is not None else ""
    if by_hand and job.known is None and isinstance(captured, Capture) and (lacks := machine.shortage(plan)):
        job.control.warn(f"{lacks} So training may end without memory. Leave strategy.{by_hand} to the planner.")
    return plan


def _announce(job: Job, captured: Captured, plan: Plan, notes: Sequence[str]) -> None:
    """Show a new plan, with notes."""
    if job.known is not None or not job.control.first:
        return
    count = job.control.num_pipelines
    job.host.inform(
        f"The plan{f', {count} pipelines' if count > 1 else ''}:\n{plan_table(plan, width=terminal_width())}"
    )
    remark = plan.notes.get(REMARK)
    for note in (*notes, *captured.notes, *([remark] if remark else [])):
        job.host.inform(wrapped(note, terminal_width(), 0))


def _connect(job: Job, plan: Plan, purpose: str) -> DistributedTransport:
    """One transport for all sessions of a purpose, connected as training needs it."""
    return DistributedTransport(job.control.mesh, pairs_of(plan), device=job.device, purpose=purpose)


def _place_parameters(job: Job, captured: Captured, plan: Plan) -> Layout:
    """Let every rank hold only the tensors that its stages use, on its device."""
    pipeline = build(captured, plan, job.module)
    used = [{*names, *buffers} for names, buffers in zip(pipeline.parameters, pipeline.buffers, strict=True)]
    steps = range(job.control.num_devices) if job.whole else (0,)
    layout = place(job.module, plan, used, steps)
    complete = settle(job.module, layout, job.control, job.device, _stored(job))
    if job.parallel is not None:
        job.parallel.divide(job.module)
    move(job.module, job.device)
    return replace(layout, complete=complete)


def _stored(job: Job) -> dict[str, Callable[[Tensor], None]]:
    """The functions that read tensors without memory from files, by name; the checkpoint goes first."""
    stored = job.stored
    checkpoint = {} if stored is None else {name: partial(stored.fill, name) for name in stored}
    return {**pretrained_values(job.module), **checkpoint}
