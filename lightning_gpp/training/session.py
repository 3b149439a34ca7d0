"""Sessions: each runs one of the user's steps in stages, for one form of its batches."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.random import RandomStreams, undisturbed
from lightning_gpp.runtime.sharding import StageSync
from lightning_gpp.runtime.stage import Binding, MicroBatch, Slot, StageModule
from lightning_gpp.runtime.weights import Weights
from lightning_gpp.runtime.weights.policy import weights_of
from lightning_gpp.schedules import Program, compile_program
from lightning_gpp.schedules.actions import COLLECTIVES
from lightning_gpp.schedules.continuous import streaming_program
from lightning_gpp.stages import Pipeline, build
from lightning_gpp.stages.build import Captured
from lightning_gpp.stages.counts import shares_of
from lightning_gpp.stages.step import InContext, Invocation, StepRunner, in_context
from lightning_gpp.training.data.batches import flushed_if_need_be
from lightning_gpp.training.host import TRAINING
from lightning_gpp.training.tensors.parameters import Layout
from lightning_gpp.training.tensors.replicas import Replicas, Site

log = logging.getLogger(__name__)

DATA_STREAM = -1
"""The stage number under which the user's step draws its random numbers."""


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch of a mini-batch whose micro-batches have sizes of their own. `batch`: where the step runs."""

    session: Session
    batch: Any
    num_samples: int


class Session:
    """Runs a step on mini-batches of one form, of any number of samples.

    Args:
        site: what the step finds in place.
        capture: the captured step.
        plan: its stages.
        streams: whether the step is evaluated without a flush between mini-batches.
        module: a copy of the job's module; None for the module itself, with the parameters of this rank.

    Attributes:
        slots: the tensors on every edge of the plan.

    Raises:
        PlanError: a stage needs parameters that other ranks hold.
    """

    def __init__(
        self,
        site: Site,
        *,
        capture: Captured,
        plan: Plan,
        streams: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        job, replicas, module = site.job, site.replicas, site.job.module if module is None else module
        self.asynchronous, self.streams = site.asynchronous, streams
        self.capture, self.plan, self.training = capture, plan, capture.step == TRAINING
        self.pipeline: Pipeline = build(capture, plan, module)
        check_placement(self.pipeline, plan, site.layout, capture.step)
        self._job, self._control, self._transport = job, job.control, site.transport
        self._streams = RandomStreams(job.seed, job.device)
        stages: Sequence[StageModule] = self.pipeline.stages
        if job.parallel is not None:
            states = [(*p, *b) for p, b in zip(self.pipeline.parameters, self.pipeline.buffers, strict=True)]
            stages = job.parallel.stages(stages, states, module)
        self._stages = self._in_context(stages)
        self._executors: dict[tuple[int, bool], Executor] = {}
        self._bindings: dict[int, Binding] = {}
        self._programs: dict[tuple[int, bool], Program] = {}
        self._meetings: dict[int, int] = {}
        self.latest: Executor | None = None
        self._replicas, self._recording, self._concurrent = replicas, site.recording, site.streams
        self._numbers = None if replicas is None else counterparts(plan, self.pipeline.parameters, replicas.layout)

    def resized(self, pipeline: Pipeline) -> Session:
        """The same session for mini-batches of other sizes, with a pipeline that differs in numbers alone."""
        other = copy(self)  # with the same programs, which know no sizes of tensors
        other.pipeline, other._stages = pipeline, self._in_context(pipeline.stages)
        other._executors, other._bindings, other.latest = {}, {}, None
        return other

    def _in_context(self, stages: Sequence[StageModule]) -> list[InContext]:
        context = self._job.host.context(self.capture.step)
        return [in_context(stage, context) for stage in stages]

    def executor(self, batch_size: int, together: bool = True) -> Executor:
        """The executor for mini-batches of this size, cached. `together`: with collectives."""
        key = batch_size, together
        if key not in self._executors:
            self._executors[key] = self._made(batch_size, together)
        return self._executors[key]

    def _made(self, batch_size: int, together: bool) -> Executor:
        control, replicas, key = self._control, self._replicas, (batch_size, together)
        if key not in self._programs:
            self._programs[key] = self._program(batch_size, together)
        return Executor(
            self._programs[key],
            control.device,
            stages=self._stages,
            slots=self.pipeline.slots,
            transport=self._transport,
            source=self.pipeline.source if control.runs_step else None,
            torch_device=self._job.device,
            streams=self._streams,
            pipeline=control.pipeline,
            sharding=cast(StageSync, Forwarded(replicas, self._numbers or {})) if together and replicas else None,
            weights=None if self.asynchronous is None else self.asynchronous.policy,
            recording=self._recording if together and self.training else None,
            streams_here=self._concurrent if self.training else None,
            num_streams=self._job.options.concurrent_stages,
            bubbles=self._job.bubbles,
            trace=self._job.options.trace,
            process=control.mesh.process,
        )

    def _program(self, batch_size: int, together: bool) -> Program:
        if self.asynchronous is not None:
            return self.asynchronous.program(self.plan, batch_size)
        if self.streams:
            return flushed_if_need_be(
                batch_size == self.plan.batch_size,
                partial(streaming_program, self.plan, batch_size),
                partial(compile_program, self.plan, batch_size, training=False),
            )
        if together:
            return compile_program(self.plan, batch_size, self.training, copies=self._control.num_pipelines)
        return compile_program(replace(self.plan, sharding="none"), batch_size, self.training, reduce=False)

    def lead(self, batch_size: int) -> int:
        """The most mini-batches of this size by which a device is ahead."""
        return self.executor(batch_size).program.lead

    @property
    def ahead(self) -> int:
        """Mini-batches that have to be known before their turn: the lead with the largest ones so far."""
        size, _ = max(self._executors, default=(0, True))
        return self.lead(size) if self.streams and size else 0

    @contextmanager
    def _agreed(self, batch_size: int) -> Iterator[Executor]:
        """Inside, an executor runs for mini-batches of this size, with collectives if all pipelines issue the same."""
        replicas = self._replicas
        meetings = 0 if replicas is None or self._numbers is None else self._meetings_of(batch_size)
        together = replicas is None or replicas.agree(meetings)
        executor = self.latest = self.executor(batch_size, together)
        with nullcontext() if together or replicas is None else replicas.gathered(self.training):
            yield executor

    def _meetings_of(self, batch_size: int) -> int:
        if batch_size not in self._meetings:
            self._meetings[batch_size] = _meetings(self.executor(batch_size).program)
        return self._meetings[batch_size]

    def run(
        self, batch: Any, invoke: Invocation, batch_size: int, *, loss_weight: float, step: int
    ) -> list[tuple[MicroBatch, Any]]:
        """Run all actions of this rank for a mini-batch. Returns the user's step's results for each micro-batch, in
        order.

        `batch` and `invoke` are used only on the rank that runs the step.
        """
        first = not self._executors
        with self._agreed(batch_size) as executor, self._begun(batch, invoke, batch_size, step) as user_step:
            executor.run(loss_weight=loss_weight, step=step)
            if first:
                self._tell_not_split(executor)
            return sorted(user_step.outputs, key=lambda output: output[0].start)

    def run_parts(
        self, parts: Sequence[Part], invoke: Invocation, *, loss_weight: float, step: int
    ) -> list[tuple[MicroBatch, Any]]:
        """Run all actions of this rank for a mini-batch whose micro-batches have sizes of their own, see `run`."""
        plan = self.plan
        size = plan.stages[plan.step_stage].micro_batch_size * len(parts)
        bindings = [part.session.binding(part.num_samples) for part in parts]
        with self._agreed(size) as executor, self._opened(parts, invoke, step):
            executor.run(loss_weight=loss_weight, step=step, bindings=bindings)
            if not self._control.runs_step:
                return []
            return [output for lane, part in enumerate(parts) for output in part.session.pipeline.step.close(lane)]

    def binding(self, num_samples: int) -> Binding:
        """The stages and tensors of a micro-batch of so many samples."""
        if num_samples not in self._bindings:
            slots = [[_sized(slot, num_samples) for slot in row] for row in self.pipeline.slots]
            source = self.pipeline.source if self._control.runs_step else None
            self._bindings[num_samples] = Binding(
                stages=self._stages, slots=slots, source=source, num_samples=num_samples
            )
        return self._bindings[num_samples]

    @contextmanager
    def _opened(self, parts: Sequence[Part], invoke: Invocation, step: int) -> Iterator[None]:
        """Inside, the user's step may run on these micro-batches, each a mini-batch of its own."""
        if not self._control.runs_step:
            yield
            return
        key = self._streams.key(DATA_STREAM, self._control.pipeline, 0, step)
        batches, sizes = [part.batch for part in parts], [part.num_samples for part in parts]
        shares = shares_of(batches, sizes, invoke.counted, self.pipeline.step.dims) or sizes
        with ExitStack() as stack:
            for part in parts:
                stack.callback(part.session.pipeline.step.end)
            stack.enter_context(self.pipeline.step.alone())
            for lane, (part, share) in enumerate(zip(parts, shares, strict=True)):
                part.session.pipeline.step.open(lane, part.batch, invoke, key, part.num_samples, share)
            yield

    @contextmanager
    def _begun(self, batch: Any, invoke: Invocation, batch_size: int, step: int) -> Iterator[StepRunner]:
        """Inside, the user's step may run on this mini-batch, on the rank that runs it."""
        user_step = self.pipeline.step
        if self._control.runs_step:
            key = self._streams.key(DATA_STREAM, self._control.pipeline, 0, step)
            user_step.begin(batch, invoke, key, batch_size)
        try:
            yield user_step
        finally:
            user_step.end()

    def run_ahead(
        self,
        batches: Sequence[Any],
        invocation: Callable[[int], Invocation],
        batch_size: int,
        *,
        loss_weight: float,
        step: int,
        segment: range,
    ) -> list[tuple[MicroBatch, Any]]:
        """Run this rank's period for a mini-batch, without a flush. Returns the user's step's results for it.

        Args:
            batches: this mini-batch and the known ones that follow; used where the step runs.
            invocation: returns the invocation of the user's step for the one so many places later.
            batch_size: samples of the mini-batch.
            loss_weight: weight of one sample.
            step: number of the mini-batch.
            segment: the mini-batches from the latest flush to the next, as far as they are known.
        """
        executor = self.latest = self.executor(batch_size)
        lanes, begins = 1 + executor.program.lead, step == segment.start
        entering = range(step if begins else step + lanes - 1, min(step + lanes, segment.stop))
        if self._control.runs_step:
            for number in entering:
                key = self._streams.key(DATA_STREAM, self._control.pipeline, 0, number)
                self.pipeline.step.open(number % lanes, batches[number - step], invocation(number - step), key)
        with undisturbed():
            executor.run(loss_weight=loss_weight, step=step, first=segment.start, last=segment.stop)
        if not self._control.runs_step:
            return []
        return sorted(self.pipeline.step.close(step % lanes), key=lambda output: output[0].start)

    def give_up(self, batch_size: int, batches: range) -> None:
        """Drop the mini-batches in the pipeline; all ranks of the pipeline call this after the same one."""
        executor = self.executor(batch_size)
        executor.give_up(batches.start, batches.stop)
        if self._control.runs_step:
            for number in batches:
                self.pipeline.step.close(number % (1 + executor.program.lead))

    def _tell_not_split(self, executor: Executor) -> None:
        """Log which of this rank's backwards the schedule splits in vain."""
        for stage, reason in executor.not_split.items():
            log.warning(
                "strategy.schedule=%s splits backwards, but that of stage %r runs as one: %s.",
                *(self.plan.schedule, self.plan.stages[stage].name, reason),
            )

    def weights_of(self, batch_size: int, optimizers: Callable[[], Sequence[Optimizer]]) -> Weights:
        """The weights of this rank's stages, with their use in the program for mini-batches of `batch_size` samples."""
        module, program = self._job.module, self.executor(batch_size).program
        here, names = program.plan.stages_on(self._control.device), self.pipeline.parameters
        parameters = {stage: [module.get_parameter(name) for name in names[stage]] for stage in here}
        mine = {name for stage in here for name in names[stage]}
        others = {
            name: [stage for stage in range(len(names)) if stage not in here and name in names[stage]] for name in mine
        }
        elsewhere = {module.get_parameter(name): stages for name, stages in others.items() if stages}
        return weights_of(program, self._control.device, parameters, optimizers, elsewhere)


def _sized(slot: Slot, num_samples: int) -> Slot:
    """A tensor that crosses a border with the shape for a number of samples."""
    shape = tuple(Affine(0, size) for size in slot.spec.sizes(num_samples))
    return replace(slot, spec=replace(slot.spec, shape=shape))


def _meetings(program: Program) -> int:
    """A positive fingerprint of the collectives of all stages and their order."""
    rows = [[i.action for i in row if i.action is not None and i.action.kind in COLLECTIVES] for row in program.devices]
    return 1 + zlib.crc32(str([[str(action) for action in row] for row in rows]).encode())


def check_placement(pipeline: Pipeline, plan: Plan, layout: Layout, step: str) -> None:
    """Raise PlanError if a stage is on a device that does not hold all its parameters and buffers.

    All ranks have those that were registered after set-up, by a hook.
    """
    for index, stage in enumerate(plan.stages):
        for name in (*pipeline.parameters[index], *pipeline.buffers[index]):
            missing = set(stage.devices) - set(layout.devices.get(name, stage.devices))
            if missing:
                raise PlanError(
                    f"In {step}, stage {stage.name!r} on devices {sorted(stage.devices)} needs {name!r}, which was "
                    f"placed on devices {sorted(layout.devices[name])} at set-up. List its module in the same stage "
                    "(strategy.stages)."
                )


class Forwarded:
    """The `StageSync` of a session, whose stages may be numbered differently than in training.

    Args:
        replicas: the replicas of the run.
        numbers: number in training of a stage of the session; missing stages have no collectives.
    """

    def __init__(self, replicas: Replicas, numbers: Mapping[int, int]) -> None:
        self._replicas, self._numbers = replicas, dict(numbers)
        self.gathers = replicas.sync.gathers

    def __getattr__(self, name: str) -> Any:
        return partial(self._of, name)

    def _of(self, collective: str, stage: int) -> None:
        if stage in self._numbers:
            getattr(self._replicas.sync, collective)(self._numbers[stage])


def counterparts(plan: Plan, parameters: Sequence[Sequence[str]], layout: Layout) -> dict[int, int] | None:
    """The stages of training with the parameters of the stages of another step, or of another form of the step.

    Args:
        plan: the plan of the other step.
        parameters: parameters that each of its stages uses.
        layout: who owns what in training.

    Returns:
        None if several stages, or replicas on other devices, use the parameters of a stage.
    """
    numbers: dict[int, int] = {}
    for stage, names in enumerate(parameters):
        found = {layout.uses[name][0] for name in names if len(layout.uses.get(name, ())) == 1}
        if len(found) > 1:
            return None
        numbers.update(dict.fromkeys([stage], *found) if found else {})
    same = all(plan.devices_of(stage) == layout.plan.devices_of(number) for stage, number in numbers.items())
    return numbers if same and len(set(numbers.values())) == len(numbers) else None
