"""Concurrent stages: what every action needs comes before it, and what does not need another does not follow it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpp.runtime.concurrent import Concurrent
from lightning_gpp.runtime.cuda import recorder_of, streams_on
from lightning_gpp.runtime.recorded import WARM, Recording
from lightning_gpp.schedules import compile_program
from lightning_gpp.schedules.actions import COLLECTIVES, Kind
from lightning_gpp.schedules.program import Op, Program
from tests.runtime.stages import Mixer, make_stages
from tests.runtime.tape import Tape
from tests.runtime.test_executor import executor_of
from tests.runtime.test_recorded import TOWERS, Run, Towers
from tests.strategies import plan_of

DIAMOND = [(0, 2), (1, 2), (0, 3), (2, 4), (3, 4)]


class Histories:
    """Streams as sets of what has been done before: marks are copies of these sets, by happens-before alone."""

    def __init__(self) -> None:
        self._done: dict[int, set[Any]] = {}
        self._current = 0
        self.used: list[tuple[int, Tensor]] = []

    @property
    def done(self) -> set[Any]:
        """What comes before the current stream's next work."""
        return self._done.setdefault(self._current, set())

    @contextmanager
    def on(self, number: int) -> Iterator[None]:
        before, self._current = self._current, number or self._current
        try:
            yield
        finally:
            self._current = before

    def mark(self) -> frozenset[Any]:
        return frozenset(self.done)

    def follow(self, mark: frozenset[Any]) -> None:
        self.done.update(mark)

    def use(self, tensor: Tensor) -> None:
        self.used.append((self._current, tensor))


def run(program: Program, stages: list[Mixer], streams: Histories, device: int = 0) -> dict[Any, frozenset[Any]]:
    """What came before each action, and, as None, before the end."""
    concurrent = Concurrent(streams, program, device, stages, 4, [()] * len(program.messages))
    found: dict[Any, frozenset[Any]] = {}

    def work(what: Any) -> None:
        found[what] = frozenset(streams.done)
        streams.done.add(what)

    concurrent.begin()
    for each in program.devices[device]:
        what = each.action if each.action is not None else (each.op, each.message)
        concurrent.operation(each, partial(work, what))()
    concurrent.end()
    return {**found, None: frozenset(streams.done)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("devices", [[(0,)] * 5, [(0,), (0,), (1,), (1,), (0,)]])
def test_only_what_is_needed_comes_before(schedule: str, devices: list[tuple[int]]) -> None:
    plan = plan_of(DIAMOND, [2] * 5, 8, devices=devices, data=True, schedule=schedule)
    program, stages = compile_program(plan), make_stages(plan)
    for device in range(plan.num_devices):
        streams = Histories()
        before = run(program, stages, streams, device)
        actions = [each.action for each in program.devices[device] if each.action is not None]
        for action in actions:
            for message in program.inputs.get((device, action), ()):
                producer = program.messages[message].producer
                assert producer in before[action] or (Op.WAIT, message) in before[action]
            if action.kind in COLLECTIVES:
                assert {each for each in actions if each.stage == action.stage} - {action} <= before[action]
        assert set(actions) <= before[None]
        for op, message in (what for what in before if isinstance(what, tuple) and what[0] is Op.SEND):
            assert program.messages[message].producer in before[op, message]
        forwards = {each.stage: each for each in actions if each.kind is Kind.FORWARD and each.micro_batch == 0}
        if {0, 1} <= forwards.keys():
            assert forwards[0] not in before[forwards[1]]
            assert forwards[1] not in before[forwards[0]]


def test_stages_with_a_parameter_in_common_do_not_run_at_the_same_time() -> None:
    plan = plan_of(DIAMOND, [2] * 5, 8, devices=[(0,)] * 5, data=True)
    stages = make_stages(plan)
    program = compile_program(plan)
    streams = Concurrent(Histories(), program, 0, stages, 4, []).stream_of
    assert len({streams[stage] for stage in range(4)}) > 1
    stages[1].weight = stages[0].weight
    shared = Concurrent(Histories(), program, 0, stages, 4, []).stream_of
    assert shared[0] == shared[1] == 0


def test_numbers_stay_the_same() -> None:
    plan = plan_of(DIAMOND, [2] * 5, 8, devices=[(0,)] * 5, data=True)
    gradients = []
    for streams in (None, Histories()):
        stages = make_stages(plan)
        executor_of(plan, stages, streams_here=streams, num_streams=4).run(loss_weight=1 / 8)
        gradients.append([p.grad for stage in stages for p in stage.parameters()])
        assert streams is None or {number for number, _ in streams.used} >= {0, 1, 2}
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_recorded_stages_are_concurrent() -> None:
    results = []
    for recording, streams in ((None, None), (Recording(recorder=Tape()), Histories())):
        run = Run(Towers(), TOWERS, recording=recording, streams_here=streams, num_streams=4)
        for number in range(6):
            run.step(number)
        results.append(run.results())
    for one, other in zip(*results, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_random_numbers_of_records_at_the_same_time(caplog: pytest.LogCaptureFixture) -> None:
    tape = Tape()
    tape.draws_apart = False
    run = Run(
        Towers(), TOWERS, recording=Recording(recorder=tape, demanded=True), streams_here=Histories(), num_streams=2
    )
    for number in range(WARM + 1):
        run.step(number)
    assert run.executor.recorded == {2}
    assert "draws random numbers" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="uses CUDA streams")
@pytest.mark.parametrize("is_recorded", [False, True])
def test_on_a_gpu(is_recorded: bool) -> None:
    device, results = torch.device("cuda", 0), []
    for streams in (None, streams_on(device)):
        recorder = recorder_of(device) if streams is not None and is_recorded else None
        recording = None if recorder is None else Recording(recorder=recorder)
        run = Run(Towers(), TOWERS, recording=recording, device=device, streams_here=streams, num_streams=4)
        for number in range(8):
            run.step(number)
        results.append(run.results())
    for one, other in zip(*results, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
