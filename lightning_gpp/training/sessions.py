"""Captures the user's steps, unless they run as they are, and makes the sessions of a run: one for each step and each
form of its mini-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from lightning_gpp._compat.torch import COMPILED_IN_PLACE, uncompiled
from lightning_gpp.capture import Capture
from lightning_gpp.capture.attributes import Attribute, dotted
from lightning_gpp.capture.batch import UNCOUNTED, BatchDims, loose_rows, named_tensors, samples_in
from lightning_gpp.capture.calls import StepCalls
from lightning_gpp.errors import CaptureError, ConfigError, GPPError, NoNetworkError, ScheduleError, ShapeError
from lightning_gpp.explained import without_name
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.transport import Transport
from lightning_gpp.schedules.continuous import check_continuous
from lightning_gpp.stages.build import Captured, Undivided, undivided
from lightning_gpp.stages.rows import known_rows
from lightning_gpp.stages.user_step import UserStep
from lightning_gpp.training.data.batches import outline
from lightning_gpp.training.data.incoming import FrozenAttributes, Incoming, adopt
from lightning_gpp.training.data.lengths import KnownLengths
from lightning_gpp.training.divided.parallel_regions import agreed_regions, captured_apart
from lightning_gpp.training.evaluation_plan import (
    check_decisions,
    check_positions,
    evaluation_plan,
    with_reductions_in_step,
)
from lightning_gpp.training.host import TRAINING, Job
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.planner import captured_step, refitted
from lightning_gpp.training.session import Session
from lightning_gpp.training.tensors.replicas import Site
from lightning_gpp.training.tensors.shards import without_shards
from lightning_gpp.training.updates.optimizers import is_first_order
from lightning_gpp.training.whole.whole_step import (
    can_run_whole,
    capture_whole,
    check_whole,
    made_for_whole,
    may_evaluate_whole,
)
from lightning_gpp.wording import sentence


class Sessions:
    """Makes a session for a step and a form of its mini-batches.

    Args:
        site: what steps find in place.
        incoming: knows the form of the mini-batch.
        captured: the captured step that the plan was made for.
        form: form of the mini-batch that it was captured with.
        example: that mini-batch, without memory.
        evaluating: transport of evaluation, if it has connections of its own, because messages of training without a
            flush may be outstanding.
    """

    def __init__(
        self,
        site: Site,
        incoming: Incoming,
        *,
        captured: Captured,
        form: int,
        example: Any,
        evaluating: Transport | None = None,
    ) -> None:
        self.job, self.incoming, self.layout = site.job, incoming, site.layout
        self.captured, self._form = captured, form
        gathers = site.replicas is not None and site.replicas.sharding == "fsdp"
        replicas, transport = site.replicas if gathers else None, evaluating or site.transport
        self.site = site
        self._evaluating = replace(site, transport=transport, replicas=replicas, asynchronous=None)
        self._at_capture = _frozen_in(site.job.module, captured)
        self._example, self._lengths = example, KnownLengths(site.job, incoming, site.asynchronous is None)
        self._rows: dict[str, tuple[set[str], set[str]]] = {}
        """Tensors with a row for each sample, and those with other rows, in the first form of each step."""
        if isinstance(captured, Capture) and not site.job.whole:
            self._check_rows(captured.step, example, captured.dims)

    def new(self, step: str, batch: Any, values: tuple[int, ...] = ()) -> Session:
        """A session for the form of the announced mini-batch, which is used only on the rank that runs the step.

        `values`: stand for the values of the attributes that captures have frozen, zeros for those of the first one.
        """
        first = (self.captured.step, self._form) == (step, self.incoming.form) and not any(values)
        changed = (self._at_capture if first else self.incoming.frozen).changes()
        if first and not self.job.control.share_flag(self.job.control.runs_step and bool(changed)):
            return self._lengths.session(step, self._example, values, lambda _: self._made(step, self.captured))
        example, known, general = self._shared(batch, changed)

        def make(other: Any) -> Session:
            return self._made(step, self._captured(step, other, known, general))

        return make(example) if general else self._lengths.session(step, example, values, make)

    def _made(self, step: str, captured: Captured) -> Session:
        if step != TRAINING and isinstance(captured, Capture):
            captured = with_reductions_in_step(captured)
        if self.job.division is not None:  # all micro-batches have one program
            captured.graph.follow(self.captured.graph)
        plan, trains = self._plan(step, captured), step == TRAINING
        site, streams = self.site if trains else self._evaluating, not trains and self._streams(plan)
        session = Session(site, capture=captured, plan=plan, streams=streams)
        if step != TRAINING and may_evaluate_whole(self.job.options, self.layout.plan):
            user_step = session.pipeline.step
            if isinstance(user_step, UserStep):
                check_decisions(user_step)
                check_positions(user_step)
        self.incoming.frozen.add(session.pipeline.frozen, session.pipeline.live)
        return session

    def _plan(self, step: str, captured: Captured) -> Plan:
        known, held = self.layout.plan, self.layout.devices
        if step == TRAINING:
            return refitted(captured, known, held)
        uncut = self.job.division is not None or (isinstance(captured, Capture) and captured.loose)
        return evaluation_plan(captured, known, held, all_cut=made_for_whole(known), uncut=uncut)

    def _streams(self, plan: Plan) -> bool:
        """True if the steps of an evaluation follow each other without a flush.

        Raises:
            ScheduleError: the user wants that, and it is not possible.
        """
        wanted, job = self.job.options.streaming, self.job
        if not wanted or plan.num_devices == 1 or job.parallel is not None or job.division is not None:
            return False
        try:
            check_continuous(plan, plan.batch_size)
        except ScheduleError:
            if wanted is True:
                raise
            return False
        return True

    def _shared(self, batch: Any, changed: Mapping[Attribute, Any]) -> tuple[Any, Mapping[Attribute, Any], bool]:
        """Share all that a capture depends on: the mini-batch without memory, the attributes that have changed, and
        whether the mini-batch has other values than those on which captures of its form depend.
        """
        control, incoming = self.job.control, self.incoming
        facts = (outline(batch), incoming.trained(), changed, incoming.has_others) if control.runs_step else None
        example, trained, changed, general = control.share_object(facts)
        incoming.train_as(trained)  # user code may have changed it only where the step runs
        adopt(self.job.module, changed)
        return example, changed, general

    def _captured(self, step: str, example: Any, changed: Mapping[Attribute, Any], general: bool) -> Captured:
        """The capture for this form of the mini-batch."""
        module = self.job.module
        with self.job.shown(), without_shards(module):
            try:
                captured = capture_of(self.job, step, example, self.layout.plan, general=general)
                if isinstance(captured, Capture):
                    self._check_rows(step, example, captured.dims)
                    self.incoming.depend_on(captured.decided, example, captured.dims)
                return captured
            except CaptureError as error:
                names, text = ", ".join(map(dotted, sorted(changed))), str(error)
                if names:
                    text = f"{names} changed, and with the new values the step cannot run on micro-batches: "
                    text += sentence(error.reason)
                raise CaptureError(f"{text}{self._remedy(step, example)}") from error

    def _check_rows(self, step: str, example: Any, dims: BatchDims) -> None:
        """Refuse tensors that had one row for each sample and have others now, or the other way round."""
        samples = samples_in(example, dims)
        if samples == 1:
            return
        owned, loose = {name for name, _ in named_tensors(example, samples, dims)}, loose_rows(example, dims)
        first_owned, first_loose = self._rows.setdefault(step, (owned, set(loose)))
        for name in sorted((first_owned & loose.keys()) | (first_loose & owned)):
            raise CaptureError(
                f"{name!r} has {loose.get(name, samples)} rows for {samples} samples; in an earlier mini-batch it "
                f"{'had' if name in first_owned else 'did not have'} one for each. If every micro-batch needs all of "
                f"them, say strategy.batch_dims={{{name}: null}}. If they belong to samples, say which are whose by "
                f"strategy.batch_rows={known_rows(self.job.module, example) or dict.fromkeys([name], '...')}."
            )

    def _remedy(self, step: str, example: Any) -> str:
        """The training step as a whole, if it can be captured on this mini-batch."""
        job = replace(self.job, whole=True)
        if step != TRAINING or self.job.whole:
            return ""
        try:
            check_whole(job.options)
            capture_whole(job, example)
        except GPPError:
            return ""
        return " As a whole it takes undivided mini-batches of any form: strategy.step=whole."


def _frozen_in(module: nn.Module, captured: Captured) -> FrozenAttributes:
    """The attributes that a capture depends on, with their present values."""
    found = FrozenAttributes(module)
    if isinstance(captured, Capture):
        recording = captured.network.recording
        scopes = recording.attributes
        cut = {key: value for scope, read in scopes.items() if scope != -1 for key, value in read.items()}
        found.add({**recording.decisive, **cut}, scopes.get(-1, {}))
    return found


def capture_of(job: Job, step: str, example: Any, known: Plan | None, *, general: bool = False) -> Captured:
    """The captured step of a job, from a mini-batch without memory.

    Args:
        job: the job of the run.
        step: the name of the method.
        example: the mini-batch.
        known: the plan of the run, if there is one.
        general: see `capture_step`.
    """
    context, parallel = job.host.context(step), job.parallel
    options, device, dims = job.options, job.device, job.dims_in(step)
    general = general or dims == UNCOUNTED  # micro-batches of a mini-batch go the same way, with any values
    record = partial(
        captured_step, job.module, example, step, options, context, device, known, general=general, dims=dims
    )
    try:
        agreed = partial(agreed_regions, job.control)
        with job.control.mesh.peers():
            return captured_apart(record, parallel, job.module, context, job.control.num_devices, agreed)
    except (CaptureError, ShapeError) as error:
        return uncaptured(job, step, example, error)


def uncaptured(job: Job, step: str, example: Any, error: CaptureError | ShapeError) -> Undivided:
    """A step that cannot be captured, as a whole on the first device; raises the error if that cannot be."""
    options, alone = job.options, job.control.num_devices == 1
    left_open = options.stages is None and options.plan is None
    if not (left_open if alone else step != TRAINING and isinstance(error, NoNetworkError)):
        raise error
    reason = (error.reason if isinstance(error, CaptureError) else "") or without_name(str(error)).splitlines()[0]
    return undivided(job.module, step, samples_in(example), f"It cannot be captured: {reason}.", alone=alone)


VALIDATION: Final = "validation_step"
STEPS: Final = TRAINING, VALIDATION, "test_step", "predict_step"


class UncapturedError(Exception):
    """Carries the error of a capture, which all ranks raise alike."""

    def __init__(self, error: CaptureError | ShapeError) -> None:
        super().__init__(str(error))
        self.error = error


def captured_in(job: Job, step: str, example: Any, calls: StepCalls | None) -> tuple[Captured, StepCalls | None]:
    """The captured step, and what was found in one that runs as a whole; None where its calls are not pipelined.

    Raises:
        UncapturedError: the step cannot be captured, and some of it has to run on another device.
    """
    try:
        if _as_it_is(job, step):
            why = "One process needs no stages."
            return undivided(job.module, step, samples_in(example), why, alone=True), None
        if not job.whole:
            return capture_of(job, step, example, job.known), None
        try:
            return capture_whole(job, example, calls, step)
        except (CaptureError, ShapeError) as error:
            return uncaptured(job, step, example, error), None
    except (CaptureError, ShapeError) as error:
        raise UncapturedError(error) from error


def as_captured(job: Job, step: str, captured: Captured, optimizers: Sequence[Optimizer]) -> Job:
    """The job, on one process for a training step that runs as it is, if it is not cut, or its optimizers repeat it."""
    uncut = isinstance(captured, Undivided) or not all(map(is_first_order, optimizers))
    alone = uncut and step == TRAINING and job.control.num_processes == 1
    return replace(job, whole=True) if alone and can_run_whole(job) else job


def steps_as_whole(job: Job, step: str) -> frozenset[str]:
    """The names of the steps that run as a whole; the engine is set up for `step`."""
    alone = {each for each in STEPS if _as_it_is(job, each)}
    return frozenset(alone | ({step} if job.whole else set()) | ({VALIDATION} if job.evaluates_whole else set()))


def _as_it_is(job: Job, step: str) -> bool:
    """True for evaluation in one process, which needs no stages, unless an option asks for them."""
    options = job.options
    cuts = options.num_micro_batches, options.micro_batch_size, options.stages, options.plan
    left_open = options.step == "auto" and options.weights == SYNCHRONOUS and all(each is None for each in cuts)
    return step != TRAINING and job.control.num_processes == 1 and left_open


def compiled_steps(module: nn.Module, steps: Sequence[str]) -> Iterator[str]:
    """Refusals of steps that are compiled together with the network that is to be cut."""
    for step in steps:
        method = getattr(module, step, None)
        function = getattr(method, "__func__", method)
        if uncompiled(function) is not function:
            yield (
                f"{type(module).__name__}.{step} is compiled (torch.compile) with the network inside, which is to be "
                "cut into stages. Compile modules that it calls and that stages call undivided, for example "
                "self.encoder.compile()."
            )


def compile_blocks(module: nn.Module) -> None:
    """Compile the items of lists of modules that are of one class, such as the layers of a transformer, which torch
    does once for all of them. Modules of torch itself run as they are.

    Raises:
        ConfigError: there are none.
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    found = [block for blocks in lists for block in blocks if sum(type(each) is type(block) for each in blocks) > 1]
    blocks = [block for block in found if not type(block).__module__.startswith("torch.")]
    if not blocks:
        raise ConfigError(
            f"strategy.compile=true compiles modules of one class that an nn.ModuleList repeats, and "
            f"{type(module).__name__} has none. Leave it out, and compile modules inside, for example "
            "self.encoder.compile()."
        )
    inside = {id(part) for block in blocks for part in block.modules() if part is not block}
    for block in blocks:
        if id(block) not in inside and vars(block).get(COMPILED_IN_PLACE) is None:
            block.compile()
