"""Compiler: turns the instructions of one device into a flat list of operations that are bound to their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import SOURCE
from lightning_gpp.runtime.boundary import carried
from lightning_gpp.runtime.offload import HostLink, Offloaded, offloading
from lightning_gpp.runtime.operations import (
    Compute,
    ComputeBackward,
    ComputeForward,
    ComputeInput,
    EdgeTensors,
    Operation,
    ReadData,
    Saved,
    State,
    after,
    borders,
    drawing,
    nothing,
)
from lightning_gpp.runtime.random import RandomStreams
from lightning_gpp.runtime.receipts import receipts
from lightning_gpp.runtime.recompute import ModuleState, RecomputedForward
from lightning_gpp.runtime.recorded import RecordedProgram
from lightning_gpp.runtime.split import SplitBackward, Splitter
from lightning_gpp.runtime.stage import (
    LOSS,
    Binding,
    DataSource,
    MicroBatch,
    Slot,
    StageForward,
    StageModule,
    StageSync,
)
from lightning_gpp.runtime.transport import Receive, Send, TransferLink, releasing
from lightning_gpp.runtime.weights.derived import Derived, Derives
from lightning_gpp.runtime.weights.policy import WeightPolicy, with_weights
from lightning_gpp.schedules.actions import COLLECTIVES, COMPUTING, RELEASES, Action, Kind
from lightning_gpp.schedules.continuous import delays_of
from lightning_gpp.schedules.program import Instruction, Message, Op, Program


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """State of one of the mini-batches that a device works on at the same time.

    A program that flushes has one lane. A continuous one has as many as mini-batches are in the pipeline at a time;
    mini-batch n takes lane n modulo their number.
    """

    number: int
    state: State
    link: TransferLink
    sends: dict[int, Send] = field(default_factory=dict)
    receives: dict[int, Receive] = field(default_factory=dict)
    saved: dict[tuple[int, int], Saved] = field(default_factory=dict)
    recomputed: dict[tuple[int, int], RecomputedForward] = field(default_factory=dict)
    splits: dict[tuple[int, int], SplitBackward] = field(default_factory=dict)
    offloaded: dict[tuple[int, int], Offloaded] = field(default_factory=dict)
    derived: dict[tuple[int, int], Derived] = field(default_factory=dict)

    def apart(self) -> Lane:
        """The same mini-batch for micro-batches of other sizes; what was sent is known by the numbers of messages."""
        return Lane(number=self.number, state=self.state, link=self.link, sends=self.sends)

    def clear(self) -> None:
        """Drop all tensors."""
        self.state.clear()
        for kept in (self.saved, self.recomputed, self.splits, self.offloaded, self.derived):
            for entry in kept.values():
                entry.clear()


class Compiler:
    """Makes the operations of a device, for every lane."""

    def __init__(
        self,
        program: Program,
        device: int,
        *,
        stages: Sequence[StageModule] | Mapping[int, StageModule],
        slots: Sequence[Sequence[Slot]],
        source: DataSource | None,
        streams: RandomStreams | None,
        pipeline: int,
        lanes: Sequence[Lane],
        sharding: StageSync | None = None,
        weights: WeightPolicy | None = None,
        recorded: RecordedProgram | None = None,
    ) -> None:
        self._program, self._plan, self._device = program, program.plan, device
        self._stages, self._slots, self._source = stages, slots, source
        self._streams, self._pipeline = streams, pipeline
        self._lanes, self._lane, self._sync, self._weights = lanes, lanes[0], sharding, weights
        rewritten = program.training and weights is not None and weights.rewrites
        self._late = [stage for stage, delay in delays_of(program).items() if delay] if rewritten else []
        self._derives: dict[int, Derives] = {}
        self._armed = _armed(program, device)
        self.splitters: dict[int, Splitter] = {}
        self._module_states: dict[int, ModuleState] = {}
        self._binding: Binding | None = None
        self._recorded = recorded
        self._receipts = receipts(program)[device]
        offloads = any(self._plan.stages[stage].offload for stage in self._plan.stages_on(device))
        self.host = HostLink(lanes[0].state.device.token.device) if offloads and program.training else None

    def bound(self, binding: Binding) -> Compiler:
        """A compiler for micro-batches of other sizes of the same mini-batch."""
        other = copy(self)
        other._stages, other._slots, other._source = binding.stages, binding.slots, binding.source
        other._binding, other._recorded, other.splitters, other._module_states = binding, None, {}, {}
        other._lanes = [lane.apart() for lane in self._lanes]
        return other

    def clear(self) -> None:
        """Drop all tensors."""
        for lane in self._lanes:
            lane.clear()

    def operation(self, position: int, instruction: Instruction, phase: int, *, hollow: bool = False) -> Operation:
        """The operation of instruction `position` in a period whose mini-batch takes lane `phase`.

        `hollow`: it computes nothing, and sends zeros of the right shape to devices that wait for a result.
        """
        self._lane = self._lane_of(phase, self._program.ahead_of(self._device)[position])
        if instruction.op is Op.COMPUTE:
            action = action_of(self._program, instruction)
            return self._hollow(action) if hollow else self._compute(action)
        message = message_of(self._program, instruction)
        if instruction.op is Op.SEND:
            return self._send(self._lane, message).run
        receive = self._receive(message)
        if instruction.op is Op.POST:
            return receive.start
        sent = self._receipts.get(position, ())
        arrived = [self._send(self._lane_of(phase, ahead), self._program.messages[number]) for ahead, number in sent]
        return releasing(receive.wait, arrived, self._lane.state.device) if arrived else receive.wait

    def _lane_of(self, phase: int, ahead: int) -> Lane:
        return self._lanes[(phase + ahead) % len(self._lanes)]

    def _send(self, lane: Lane, message: Message) -> Send:
        if message.id not in lane.sends:
            lane.sends[message.id] = Send(lane.link, message)
        return lane.sends[message.id]

    def _receive(self, message: Message) -> Receive:
        lane = self._lane
        if message.id not in lane.receives:
            slots = carried(self._plan.edges[message.edge], self._slots[message.edge], message.gradient)
            lane.receives[message.id] = Receive(lane.link, message, slots)
        return lane.receives[message.id]

    def _compute(self, action: Action) -> Operation:
        if action.kind in COLLECTIVES:
            return self._meeting(action)
        operation = self._share(action)
        if self._recorded is not None and operation is not nothing and action.kind is not Kind.DATA:
            self._recorded.note(action)
        if self.host is not None and action.kind in COMPUTING:
            operation = after(self.host.compute, operation)
        if self._weights is not None and action.kind in _COMPUTED_WITH:
            operation = with_weights(self._weights, action, self._lane.state, operation)
        if self._sync is None or action.kind is Kind.DATA:
            return operation
        if action in self._armed:  # all-reduces of gradients may start during the last backward
            operation = after(partial(self._sync.arm, action.stage), operation)
        if self._sync.gathers:  # a replica without samples waits for the parameters, too
            operation = after(partial(self._sync.ready, action.stage), operation)
        return operation

    def _share(self, action: Action) -> Operation:
        make = {
            Kind.DATA: self._data,
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._input_gradients,
            Kind.WEIGHT: self._weight_gradients,
            Kind.OFFLOAD: self._offload,
            Kind.LOAD: self._load,
        }[action.kind]
        micro_batch = self._micro_batch(action)
        return make(action, micro_batch) if micro_batch.num_samples else nothing

    def _hollow(self, action: Action) -> Operation:
        """Zeros for devices that wait for a result."""
        if action.kind in COLLECTIVES or not self._program.outputs.get((self._device, action)):
            return nothing
        micro_batch = self._micro_batch(action)
        return Compute(**self._common(action, micro_batch)).hand_out_zeros if micro_batch.num_samples else nothing

    def _micro_batch(self, action: Action) -> MicroBatch:
        """This device's share of a micro-batch."""
        start, stop = self._interval(action)
        if self._binding is not None and start < stop:
            return self._binding.micro_batch(action.micro_batch)
        return MicroBatch(action.micro_batch, start, stop, self._program.batch_size, self._lane.number)

    def _interval(self, action: Action) -> tuple[int, int]:
        stage = SOURCE if action.kind is Kind.DATA else action.stage
        return self._plan.share(stage, self._device, action.micro_batch, self._program.batch_size)

    def _common(self, action: Action, micro_batch: MicroBatch) -> dict[str, Any]:
        key = (self._device, action)
        interval = (micro_batch.start, micro_batch.stop)
        incoming = borders(self._program, self._program.inputs.get(key, ()), self._slots, interval)
        outgoing = borders(self._program, self._program.outputs.get(key, ()), self._slots, interval)
        return {
            "state": self._lane.state,
            "owner": f"Stage {self._plan.stages[action.stage].name!r} (micro-batch {action.micro_batch})",
            "micro_batch": micro_batch,
            "incoming": incoming,
            "outgoing": outgoing,
        }

    def _data(self, action: Action, micro_batch: MicroBatch) -> Operation:
        if self._source is None:
            raise ScheduleError(f"Action {action} on device {self._device} needs the data source, but none was given.")
        common = self._common(action, micro_batch)
        common["owner"] = f"The step's call of the network (micro-batch {action.micro_batch})"
        return ReadData(**common, source=self._source).run

    def _forward(self, action: Action, micro_batch: MicroBatch) -> Operation:
        if self._program.training and self._plan.stages[action.stage].reruns:
            return self._recomputed(action, micro_batch).run
        return ComputeForward(**self._forward_arguments(action, micro_batch)).run

    def _forward_arguments(self, action: Action, micro_batch: MicroBatch) -> dict[str, Any]:
        common = self._common(action, micro_batch)
        training = self._program.training
        return common | {
            "forward": self._noting(action, self._offloading(action, self._with_stream(action, common))),
            "saved": self._saved(action) if training else None,
            "differentiable": _differentiable(common["outgoing"]),
            "losses": _losses(common["outgoing"], training and action.stage == self._plan.step_stage),
        }

    def _offloading(self, action: Action, forward: StageForward) -> StageForward:
        if self.host is None or not self._plan.stages[action.stage].offload:
            return forward
        return offloading(forward, self._offloaded(action), self._stages[action.stage].parts, self._derived(action))

    def _noting(self, action: Action, forward: StageForward) -> StageForward:
        derived = self._derived(action)
        return forward if derived is None else derived.noting(forward)

    def _derived(self, action: Action) -> Derived | None:
        """The notes of a forward that its backward needs; None if that has the same values, or runs it again."""
        stage, key = action.stage, (action.stage, action.micro_batch)
        if stage not in self._late or self._plan.stages[stage].reruns:
            return None
        derives = self._derives.setdefault(stage, Derives())
        return self._lane.derived.setdefault(key, Derived(self._stages[stage], derives))

    def _offload(self, action: Action, micro_batch: MicroBatch) -> Operation:
        return self._offloaded(action).start

    def _load(self, action: Action, micro_batch: MicroBatch) -> Operation:
        return self._offloaded(action).load

    def _prepared(self, action: Action, backward: Operation) -> Operation:
        derived = self._derived(action)
        backward = backward if derived is None else derived.renewing(backward)
        is_offloaded = self.host is not None and self._plan.stages[action.stage].offload
        return after(self._offloaded(action).wait, backward) if is_offloaded else backward

    def _offloaded(self, action: Action) -> Offloaded:
        assert self.host is not None
        return self._lane.offloaded.setdefault((action.stage, action.micro_batch), Offloaded(self.host))

    def _recompute(self, action: Action, micro_batch: MicroBatch) -> Operation:
        return self._recomputed(action.of_kind(Kind.FORWARD), micro_batch).run_again

    def _recomputed(self, forward: Action, micro_batch: MicroBatch) -> RecomputedForward:
        key, made = (forward.stage, forward.micro_batch), self._lane.recomputed
        if key not in made:
            modules = self._module_state(forward.stage)
            made[key] = RecomputedForward(**self._forward_arguments(forward, micro_batch), modules=modules)
        return made[key]

    def _backward(self, action: Action, micro_batch: MicroBatch) -> Operation:
        common, saved = self._common(action, micro_batch), self._saved(action)
        return self._prepared(action, ComputeBackward(**common, saved=saved).run)

    def _input_gradients(self, action: Action, micro_batch: MicroBatch) -> Operation:
        common, split = self._common(action, micro_batch), self._split(action)
        return self._prepared(action, ComputeInput(**common, saved=self._saved(action), split=split).run)

    def _weight_gradients(self, action: Action, micro_batch: MicroBatch) -> Operation:
        weights = self._split(action).weight_gradients
        return weights if self._recorded is None else after(weights, partial(self._recorded.weights, action))

    def _meeting(self, action: Action) -> Operation:
        if self._sync is None:
            return nothing
        meet = {
            Kind.UNSHARD: self._sync.unshard,
            Kind.RESHARD: self._sync.reshard,
            Kind.REDUCE: self._sync.reduce,
        }[action.kind]
        return partial(meet, action.stage)

    def _split(self, action: Action) -> SplitBackward:
        splitter = self.splitters.setdefault(action.stage, Splitter())
        return self._lane.splits.setdefault((action.stage, action.micro_batch), SplitBackward(splitter))

    def _saved(self, action: Action) -> Saved:
        if self._weights is None or not self._weights.newest_graphs:
            return self._lane.saved.setdefault((action.stage, action.micro_batch), Saved())
        stage = self._plan.stages[action.stage]
        if stage.reruns or stage.offload:
            raise ScheduleError(
                f"Stage {stage.name!r} recomputes or offloads activations, but strategy.weights=newest_graph keeps "
                "those of one sample only. Use strategy.recompute=false and strategy.offload=false."
            )
        return self._lanes[0].saved.setdefault((action.stage, 0), Saved())  # all mini-batches share it

    def _module_state(self, stage: int) -> ModuleState:
        if stage not in self._module_states:
            self._module_states[stage] = ModuleState(self._stages[stage].parts)
        return self._module_states[stage]

    def _with_stream(self, action: Action, common: Mapping[str, Any]) -> StageForward:
        stage, state, streams = self._stages[action.stage], self._lane.state, self._streams
        if self._recorded is not None:
            received = (border for border in common["incoming"] if not border.edge.artificial)
            slots = (slot for border in received for slot in border.slots)
            stage = self._recorded.stage(action, stage, slots, common["micro_batch"].num_samples)
        if streams is None or not stage.uses_random:
            return stage.forward
        first, _ = self._interval(action)
        return drawing(stage, streams, state, (action.stage, self._pipeline, first))


def _armed(program: Program, device: int) -> set[Action]:
    """The last backward of each stage before its REDUCE, unless another stage's REDUCE comes in between.

    All-reduces that start during this backward then start in the order of the program, which all replicas share.
    """
    actions = (instruction.action for instruction in program.devices[device])
    last: dict[int, Action] = {}
    armed = set()
    for action in actions:
        if action is not None and action.kind in RELEASES:
            last[action.stage] = action
        elif action is not None and action.kind is Kind.REDUCE:
            if action.stage in last:
                armed.add(last[action.stage])
            last.clear()
    return armed


_COMPUTED_WITH: Final = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT)
"""Kinds of actions that read the values of parameters."""


def _differentiable(outgoing: Iterable[EdgeTensors]) -> tuple[str, ...]:
    names = (slot.name for b in outgoing for slot in b.slots if slot.spec.requires_grad)
    return tuple(dict.fromkeys(names))


def _losses(outgoing: Iterable[EdgeTensors], runs_step: bool) -> tuple[str, ...]:
    """The results at which the stage's backward starts."""
    local = dict.fromkeys(slot.name for border in outgoing for slot in border.slots if slot.spec.local_loss)
    return (*local, LOSS) if runs_step else (*local,)


def action_of(program: Program, instruction: Instruction) -> Action:
    """The action of an instruction, or the one that sends or receives its message."""
    if instruction.action is not None:
        return instruction.action
    message = message_of(program, instruction)
    return message.producer if instruction.op is Op.SEND else message.consumer


def message_of(program: Program, instruction: Instruction) -> Message:
    if instruction.message is None:
        raise ScheduleError(f"A {instruction.op.value} instruction names no message: {instruction}.")
    return program.messages[instruction.message]
