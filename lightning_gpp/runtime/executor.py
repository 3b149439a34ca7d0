"""The executor: one device's part of a program, compiled once into a flat list of operations, then run for every
mini-batch.

What it keeps: the inputs of a forward that need gradients and the autograd edges of its outputs, until the backward
(all inputs and no edges where the plan says to recompute); what it received, until it was read; what it sends, until it
is known to have arrived. Nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from lightning_gpp.errors import add_note
from lightning_gpp.runtime.compiler import Compiler, Operation, action_of
from lightning_gpp.runtime.operations import State
from lightning_gpp.runtime.random import RandomStreams
from lightning_gpp.runtime.sharding.interface import StageSync
from lightning_gpp.runtime.stage import DataSource, Slot, StageModule
from lightning_gpp.runtime.transfers import Link
from lightning_gpp.runtime.transport import Transport
from lightning_gpp.schedules.actions import Action
from lightning_gpp.schedules.program import Op, Program


class Executor:
    """Runs one device's instructions of a verified program.

    Args:
        program: what to run.
        device: which of its devices this is.
        stages: `stages[i]` computes stage i; only those of this device are used.
        slots: for every edge of the plan the tensors that it carries.
        transport: moves tensors to and from the other devices.
        source: the user's step up to the inputs of the network; needed where the step's stage lives.
        torch_device: where received tensors are allocated.
        streams: random numbers for the stages that draw some; None leaves them on the default generator.
        pipeline: which pipeline replica this is, for the random streams and for messages.
        sharding: what the ranks that hold the same stage do together; without one they do nothing.
        trace: measure every action (see `timings`) and name it for `torch.profiler`.

    Attributes:
        timings: (action, start, stop) of the latest run, in seconds of `time.perf_counter`; empty without `trace`.

    Raises:
        ScheduleError, PlanError: the program does not fit the slots.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        *,
        stages: Sequence[StageModule] | Mapping[int, StageModule],
        slots: Sequence[Sequence[Slot]],
        transport: Transport,
        source: DataSource | None = None,
        torch_device: torch.device | None = None,
        streams: RandomStreams | None = None,
        pipeline: int = 0,
        sharding: StageSync | None = None,
        trace: bool = False,
    ) -> None:
        self.program, self.device, self.pipeline = program, device, pipeline
        self.timings: list[tuple[Action, float, float]] = []
        tensors_on = torch_device or torch.device("cpu")
        self._state = State(len(program.messages), program.plan.stages_on(device), tensors_on)
        self._link = Link(transport, self._state.values, tensors_on)
        self._compiler = Compiler(
            program,
            device,
            stages=stages,
            slots=slots,
            source=source,
            streams=streams,
            pipeline=pipeline,
            state=self._state,
            link=self._link,
            sharding=sharding,
        )
        self._instructions = program.devices[device]
        self._position = 0
        self._operations = self._compiled(trace)

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """For every stage of this device the largest number of micro-batches that were between the start of their
        forward and the end of their backward at the same time, over all runs."""
        return dict(self._state.peak)

    @property
    def warm_up(self) -> dict[int, int]:
        """For every stage of this device the number of forwards before its first backward, in the latest run."""
        return dict(self._state.warm_up)

    @property
    def not_split(self) -> dict[int, str]:
        """Stages of this device whose backward was to be split and is not, so that I does all the work, and why."""
        return {stage: splitter.reason for stage, splitter in self._compiler.splitters.items() if splitter.reason}

    @property
    def current_action(self) -> Action | None:
        """What this device computes, or is sending or waiting for; after a run its last action."""
        if not self._instructions:
            return None
        return action_of(self.program, self._instructions[self._position])

    def describe(self) -> str:
        """Where this device is, for messages: rank, and the stage and action that it is busy with."""
        rank = f"rank {self.pipeline * self.program.plan.num_devices + self.device}"
        action = self.current_action
        if action is None:
            return rank
        operation = self._instructions[self._position].op.value
        return f"{rank}, stage {self.program.plan.stages[action.stage].name!r}, action {action} ({operation})"

    def run(self, *, loss_weight: float = 1.0, grad_scale: float = 1.0, step: int = 0) -> None:
        """Run this device's part for one mini-batch; gradients are added to the parameters' `.grad`.

        Args:
            loss_weight: weight of one sample. 1 / (samples of all pipeline replicas) gives the gradient of the mean.
            grad_scale: a further factor on the gradient, for mixed precision.
            step: number of the optimizer step, for the random streams.

        Raises:
            ShapeError: a stage returned a tensor of other shape or dtype than was agreed.
            GPPError: the step returned no loss.
        """
        self._state.begin(loss_weight * grad_scale, step)
        self.timings.clear()
        try:
            with torch.set_grad_enabled(self.program.training):
                for self._position, operation in enumerate(self._operations):  # noqa: B020
                    operation()
                self._link.finish()
        except BaseException as error:
            add_note(error, f"This happened on {self.describe()}.")
            self._drop()
            raise

    def _compiled(self, trace: bool) -> list[Operation]:
        operations: list[Operation] = []
        for position, instruction in enumerate(self._instructions):
            operation = self._compiler.operation(position, instruction)
            if trace and instruction.op is Op.COMPUTE:
                operation = self._traced(action_of(self.program, instruction), operation)
            operations.append(operation)
        return operations

    def _traced(self, action: Action, operation: Operation) -> Operation:
        name = str(action)

        def run() -> None:
            start = time.perf_counter()
            with torch.profiler.record_function(name):
                operation()
            self.timings.append((action, start, time.perf_counter()))

        return run

    def _drop(self) -> None:
        """After a failure: let go of all tensors."""
        self._state.clear()
        self._link.unfinished.clear()
        for inbox in self._compiler.inboxes.values():
            inbox.clear()
        for saved in self._compiler.saved.values():
            saved.clear()
        for forward in self._compiler.recomputed.values():
            forward.clear()
        for split in self._compiler.splits.values():
            split.clear()
