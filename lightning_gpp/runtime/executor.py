"""The executor: one device's part of a program, compiled once into a flat list of operations, then run for every
mini-batch.

It keeps the inputs of a forward that need gradients and the autograd edges of its outputs until the backward (for
recomputed stages all inputs and no edges), received tensors until they are read, and sent tensors until they are known
to have arrived. Nothing else.

A continuous program is run period by period. A device keeps the state of each mini-batch in a lane of its own, so that
it can work on several; fill and drain are periods without the operations of mini-batches that do not exist.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch

from lightning_gpp.errors import add_note
from lightning_gpp.failure.hangs import Wait
from lightning_gpp.runtime.boundary import DeviceState, carried, describe_edge
from lightning_gpp.runtime.bubbles import Bubbles
from lightning_gpp.runtime.compiler import Compiler, Lane, action_of
from lightning_gpp.runtime.concurrent import Concurrent, Streams
from lightning_gpp.runtime.operations import Operation, State
from lightning_gpp.runtime.random import RandomStreams
from lightning_gpp.runtime.recorded import WARM, RecordedProgram, Recording
from lightning_gpp.runtime.stage import Binding, DataSource, Slot, StageModule, StageSync
from lightning_gpp.runtime.transport import Routes, Send, TransferLink, Transport
from lightning_gpp.runtime.weights.policy import WeightPolicy
from lightning_gpp.schedules.actions import COLLECTIVES, Action
from lightning_gpp.schedules.program import Op, Program


class Executor:
    """Runs one device's instructions of a verified program.

    Args:
        program: the program to run.
        device: the device of the program that this is.
        stages: `stages[i]` computes stage i; only those of this device are used.
        slots: the tensors that every edge of the plan carries.
        transport: moves tensors to and from the other devices.
        source: the user's step up to the inputs of the network; needed on devices of the step's stage.
        torch_device: the device of received tensors.
        streams: random streams for stages that draw random numbers; None leaves them on the default generator.
        pipeline: number of this pipeline replica, for the random streams and for messages.
        sharding: collectives of the ranks that hold the same stage; None for no collectives.
        weights: policy for the values of the parameters with which actions compute; None for the current ones.
        recording: records what the stages launch; only for training programs that flush, with current weights,
            without offloading, and with a StageSync that leaves parameters in their memory.
        streams_here: streams of the device, on which stages compute at the same time; only for programs that flush.
        num_streams: the most of these besides the current one.
        bubbles: has work for the time in which the device waits for messages.
        trace: measure every action (see `timings`) and name it for `torch.profiler`.
        process: returns the process of a rank, for messages.

    Attributes:
        timings: (action, start, stop) of the latest run, in seconds of `time.perf_counter`; empty without `trace`.
        is_running: whether a run is under way.
        is_complete: whether the latest run has ended, and not by an error.
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
        weights: WeightPolicy | None = None,
        recording: Recording | None = None,
        streams_here: Streams | None = None,
        num_streams: int = 1,
        bubbles: Bubbles | None = None,
        trace: bool = False,
        process: Callable[[int], int] = int,
    ) -> None:
        self.program, self.device, self.pipeline, self._process = program, device, pipeline, process
        self.timings: list[tuple[Action, float, float]] = []
        self.is_running, self.is_complete = False, False
        tensors_on = torch_device or torch.device("cpu")
        self._state = DeviceState(tensors_on)
        self._weights, self._slots, self._sharding = weights, slots, sharding
        self._unfinished: deque[Send] = deque()
        self._bubbles = bubbles
        repeats = WARM if recording is not None else 0  # the first repeats of records load what they launch, too
        self._routes = self._routes_of(transport, 1 + program.lead + repeats)
        self._lanes = [self._lane(number, transport, tensors_on) for number in range(1 + program.lead)]
        names = [stage.name for stage in program.plan.stages]
        self._concurrent = None
        if streams_here is not None:
            values = self._lanes[0].state.values
            self._concurrent = Concurrent(streams_here, program, device, stages, num_streams, values)
        of_stages = self._concurrent.stream_of if self._concurrent is not None else {}
        self._recorded = RecordedProgram(recording, names, of_stages) if recording is not None else None
        self._compiler = Compiler(
            program,
            device,
            stages=stages,
            slots=slots,
            source=source,
            streams=streams,
            pipeline=pipeline,
            lanes=self._lanes,
            sharding=sharding,
            weights=weights,
            recorded=self._recorded,
        )
        self._instructions = program.devices[device]
        self._ahead = program.ahead_of(device)
        self._position = 0
        sends = enumerate(self._instructions)
        self._position_of = {each.message: position for position, each in sends if each.op is Op.SEND}
        self._lead, self._own_lead = program.lead, program.lead_of(device)
        self._trace = trace
        self._periods = [self._compiled(phase) for phase in range(len(self._lanes))]
        self._hollow: list[list[Operation]] = []
        self._bound = WeakKeyDictionary[Binding, tuple[Compiler, dict[int, Operation]]]()

    def _routes_of(self, transport: Transport, loading: int) -> Routes:
        """Routes for mini-batches; the first ones, until one has left the pipeline, may have to load kernels."""
        talks = any(each.op in (Op.SEND, Op.POST) for each in self.program.devices[self.device])
        return Routes(transport, loading if talks else 0)

    def _lane(self, number: int, transport: Transport, device: torch.device) -> Lane:
        state = State(len(self.program.messages), self._state)
        link = TransferLink(transport, state.values, device, self._unfinished, self._bubbles)
        return Lane(number=number, state=state, link=link)

    @property
    def not_split(self) -> dict[int, str]:
        """Reasons why backwards that should be split are not, so that I does all the work, by stage of this device."""
        return {stage: splitter.reason for stage, splitter in self._compiler.splitters.items() if splitter.reason}

    @property
    def recorded(self) -> set[int]:
        """Numbers of the stages of this device that are recorded."""
        return set() if self._recorded is None else self._recorded.recorded

    @property
    def current_action(self) -> Action | None:
        """The action that this device computes, sends or waits for; after a run, its last one."""
        if not self._instructions:
            return None
        return action_of(self.program, self._instructions[self._position])

    def describe(self) -> str:
        """The state of this device for messages: rank, stage and action."""
        return f"rank {self._rank(self.device)}, {self.place}"

    @property
    def place(self) -> str:
        """The stage and the action of this device for messages."""
        action = self.current_action
        if action is None:
            return "a device without actions"
        operation = self._instructions[self._position].op.value
        return f"stage {self.program.plan.stages[action.stage].name!r}, action {action} ({operation})"

    def wait(self) -> Wait | None:
        """The messages or ranks that this device may wait for now; None if it computes, or nothing runs."""
        if not self.is_running or not self._instructions:
            return None
        return self.wait_at(self._position)

    def wait_at(self, position: int) -> Wait | None:
        """The messages or ranks for which an instruction waits; None if it computes."""
        instruction = self._instructions[position]
        if instruction.message is None:
            return self._wait_for_replicas(action_of(self.program, instruction))
        message = self.program.messages[instruction.message]
        sends, plan = instruction.op is Op.SEND, self.program.plan
        peer, edge = message.dst if sends else message.src, plan.edges[message.edge]
        names = ", ".join(slot.name for slot in carried(edge, self._slots[message.edge], message.gradient))
        kind = "gradients" if message.gradient else "tensors"
        action = message.consumer if sends else message.producer
        what = (
            f"rank {self._rank(peer)} to {'take' if sends else 'send'} {kind} ({names}) of micro-batch "
            f"{action.micro_batch}, samples [{message.start}, {message.stop}), on {describe_edge(plan, edge)}"
        )
        return Wait(what=what, ranks=(self._rank(peer),))

    def _wait_for_replicas(self, action: Action) -> Wait | None:
        if action.kind not in COLLECTIVES or self._sharding is None:
            return None
        stage = self.program.plan.stages[action.stage]
        ranks = tuple(self._rank(device) for device in stage.devices if device != self.device)
        return Wait(what=f"the other ranks that hold stage {stage.name!r}, in {action}", ranks=ranks)

    def _rank(self, device: int) -> int:
        return self._process(self.pipeline * self.program.plan.num_devices + device)

    def run(
        self,
        *,
        loss_weight: float = 1.0,
        grad_scale: float = 1.0,
        step: int = 0,
        first: int | None = None,
        last: int | None = None,
        bindings: Sequence[Binding] | None = None,
    ) -> None:
        """Run this device's part for one mini-batch; gradients are added to the parameters' `.grad`.

        A continuous program works on mini-batches `first` to `last` (exclusive) without a flush: call this for each of
        them. At the first one the pipeline fills, at the last one it drains. Until `lead` mini-batches before the end,
        `last` may be any number that is large enough; from then on it has to be exact.

        Args:
            loss_weight: weight of one sample. 1 / (samples of all pipeline replicas) gives the gradient of the mean.
            grad_scale: a further factor on the gradient, for mixed precision.
            step: number of the mini-batch, also for the random streams.
            first: the mini-batch with which the pipeline filled; by default `step`.
            last: the mini-batch after the last one; by default `step` + 1.
            bindings: of each micro-batch, if they have different sizes; only for programs that flush, whose
                micro-batches are the same for all stages.

        Raises:
            ShapeError: a stage returned a tensor of an unexpected shape or dtype.
            GPPError: the step returned no loss.
        """
        first, last = step if first is None else first, step + 1 if last is None else last
        recorded = self._recorded if bindings is None else None
        self.timings.clear()
        self.is_running, self.is_complete = True, False
        try:
            with torch.set_grad_enabled(self.program.training):
                if recorded is not None:
                    recorded.begin()
                if self._concurrent is not None:
                    self._concurrent.begin()
                self._enter(step, first, last, loss_weight * grad_scale)
                if step == first:
                    for period in range(first - self._own_lead, first):  # the pipeline fills
                        self._run_period(period, first, last)
                self._run_period(step, first, last, None if bindings is None else self._of_micro_batches(bindings))
                if step + 1 == last:
                    self._finish_sends()
            if self._concurrent is not None:
                self._concurrent.end()
            if recorded is not None:
                recorded.end()
            self.is_complete = True
        except BaseException as error:
            add_note(error, f"This happened on {self.describe()}.")
            self._drop()
            raise
        finally:
            self.is_running = False

    def give_up(self, step: int, last: int) -> None:
        """Drop the mini-batches in the pipeline, from `step` to `last`: nothing is computed for them any more.

        Outstanding messages are still received and sent, so all devices of the pipeline call this after the same
        period, and the pipeline is empty afterwards.

        Args:
            step: the mini-batch whose period would follow.
            last: the mini-batch after the last one that any device has started.
        """
        if not self._hollow:
            self._hollow = [self._compiled(phase, hollow=True) for phase in range(len(self._lanes))]
        self._state.steady = False
        for period in range(step, last):
            for position, ahead in enumerate(self._ahead):
                if period + ahead < last:
                    self._hollow[period % len(self._lanes)][position]()
        self._finish_sends()
        self._drop()

    def _enter(self, step: int, first: int, last: int, weight: float) -> None:
        """Assign lanes to the mini-batches that enter."""
        lead = self._lead
        for batch in range(first if step == first else step + lead, min(step + lead + 1, last)):
            lane = self._lanes[batch % len(self._lanes)]
            lane.state.begin(weight, batch)
            lane.link.transport = self._routes.next()

    def _run_period(self, period: int, first: int, last: int, bound: list[Operation] | None = None) -> None:
        operations = self._periods[period % len(self._lanes)] if bound is None else bound
        self._state.steady = first <= period and period + self._lead < last
        if self._state.steady:
            for self._position, operation in enumerate(operations):  # noqa: B020
                operation()
            return
        for position, ahead in enumerate(self._ahead):
            if first <= period + ahead < last:
                self._position = position
                operations[position]()

    def _finish_sends(self) -> None:
        while self._unfinished:
            self._position = self._position_of[self._unfinished[0].message]
            self._unfinished.popleft().release()

    def _compiled(self, phase: int, hollow: bool = False) -> list[Operation]:
        return [self._operation(self._compiler, place, phase, hollow) for place in range(len(self._instructions))]

    def _operation(self, compiler: Compiler, position: int, phase: int, hollow: bool = False) -> Operation:
        instruction = self._instructions[position]
        operation = compiler.operation(position, instruction, phase, hollow=hollow)
        if self._trace and not hollow and instruction.op is Op.COMPUTE:
            operation = self._traced(action_of(self.program, instruction), operation)
        return operation if self._concurrent is None else self._concurrent.operation(instruction, operation)

    def _of_micro_batches(self, bindings: Sequence[Binding]) -> list[Operation]:
        """The operations of a period, each for the sizes of its micro-batch."""
        operations = list(self._periods[0])
        for position, instruction in enumerate(self._instructions):
            action = action_of(self.program, instruction)
            if action.kind in COLLECTIVES:
                continue
            binding = bindings[action.micro_batch]
            if binding not in self._bound:
                self._bound[binding] = self._compiler.bound(binding), {}
            compiler, known = self._bound[binding]
            if position not in known:
                known[position] = self._operation(compiler, position, 0)
            operations[position] = known[position]
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
        """Drop all tensors, after a failure."""
        self._unfinished.clear()
        if self._compiler.host is not None:
            self._compiler.host.clear()
        for compiler in (self._compiler, *(compiler for compiler, _ in self._bound.values())):
            compiler.clear()
