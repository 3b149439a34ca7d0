"""Concurrent stages: stages of one device that do not depend on each other compute at the same time.

Each has a stream of its own. An action follows the actions that made what it reads, wherever they ran, and nothing
else; so branches of a stage graph, and micro-batches in different stages, share the device:

    stream 0    data .......................... head (step) ..
    stream 1    .... tower 0 ...............'
    stream 2    .... tower 1 ...............'

Streams follow stream 0, the current one, when a mini-batch begins, and stream 0 follows them when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_gpp._compat.torch import parameters_of
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.boundary import MessageTensors
from lightning_gpp.runtime.stage import StageModule
from lightning_gpp.schedules.actions import COLLECTIVES, Action, Kind
from lightning_gpp.schedules.program import Instruction, Op, Program

Operation = Callable[[], object]


class Streams(Protocol):
    """Streams of a device, of which number 0 is the current one."""

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Inside, this stream is the current one."""
        ...

    def mark(self) -> Any:
        """A mark of all that the current stream has been given so far."""
        ...

    def follow(self, mark: Any) -> None:
        """Let what the current stream is given from now on come after what a mark stands for."""
        ...

    def use(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the current stream has done what it has been given so far, and more."""
        ...


class Concurrent:
    """Gives the actions of a device, in a program that flushes, to streams.

    Args:
        streams: the device's streams.
        program: the program.
        device: the device.
        stages: the stages of the program.
        number: the most streams besides the current one.
        values: the tensors of messages.
    """

    def __init__(
        self,
        streams: Streams,
        program: Program,
        device: int,
        stages: Sequence[StageModule] | Mapping[int, StageModule],
        number: int,
        values: MessageTensors,
    ) -> None:
        self._streams, self._program, self._device, self._values = streams, program, device, values
        here = program.plan.stages_on(device)
        self.stream_of = streams_of(program.plan, here, {stage: stages[stage].parts for stage in here}, number)
        self._marks: dict[int, Any] = {}
        self._latest: dict[int, Any] = {}

    def begin(self) -> None:
        """Let all streams follow the current one."""
        self._marks.clear()
        self._latest.clear()
        mark = self._streams.mark()
        for number in set(self.stream_of.values()) - {0}:
            with self._streams.on(number):
                self._streams.follow(mark)

    def end(self) -> None:
        """Let the current stream follow all others."""
        for mark in self._latest.values():
            self._streams.follow(mark)

    def operation(self, instruction: Instruction, operation: Operation) -> Operation:
        """An instruction's operation, on its stream and after what it needs."""
        action, message = instruction.action, instruction.message
        if action is not None and action.kind in COLLECTIVES:
            return partial(self._after_stage, action.stage, operation)
        if action is not None:
            number = 0 if action.kind is Kind.DATA else self.stream_of[action.stage]
            return partial(self._compute, action, number, operation)
        assert message is not None
        if instruction.op is Op.SEND:
            return partial(self._send, message, operation)
        return operation if instruction.op is Op.POST else partial(self._receive, message, operation)

    def _compute(self, action: Action, number: int, operation: Operation) -> None:
        key = (self._device, action)
        with self._streams.on(number):
            self._take(self._program.inputs.get(key, ()))
            operation()
            mark = self._streams.mark()
        self._marks.update(dict.fromkeys(self._program.outputs.get(key, ()), mark))
        if number:
            self._latest[action.stage] = mark

    def _send(self, message: int, operation: Operation) -> None:
        self._take((message,))
        operation()

    def _receive(self, message: int, operation: Operation) -> None:
        operation()
        self._marks[message] = self._streams.mark()

    def _after_stage(self, stage: int, operation: Operation) -> None:
        if stage in self._latest:
            self._streams.follow(self._latest[stage])
        operation()

    def _take(self, messages: Iterable[int]) -> None:
        for message in messages:
            self._streams.follow(self._marks.pop(message))
            for tensor in self._values[message] or ():
                if tensor is not None:
                    self._streams.use(tensor)


def streams_of(
    plan: Plan, stages: Sequence[int], parts: Mapping[int, Sequence[nn.Module]], number: int
) -> dict[int, int]:
    """The stream of each stage of a device.

    A stage goes on in the stream of a stage before it, of which the first one after it takes it over; others begin
    streams, up to `number`. The step's stage and those that share parameters are in stream 0.
    """
    alone, found, free, begun = _without_shared(parts), dict[int, int](), dict[int, int](), 0
    for stage in stages:
        if stage == plan.step_stage or stage not in alone:
            found[stage] = 0
            continue
        before = [edge.src for edge in plan.edges if edge.dst == stage and free.get(edge.src)]
        if before:
            found[stage] = free.pop(before[0])
        else:
            found[stage] = 1 + begun % number
            begun += 1
        free[stage] = found[stage]
    return found


def _without_shared(parts: Mapping[int, Sequence[nn.Module]]) -> set[int]:
    """The stages that have no parameter with another one in common."""
    users: dict[int, set[int]] = {}
    for stage, modules in parts.items():
        for module in modules:
            for parameter in parameters_of(module).values():
                users.setdefault(id(parameter), set()).add(stage)
    users.pop(id(None), None)
    shared = {stage for each in users.values() if len(each) > 1 for stage in each}
    return set(parts) - shared
