"""What holds for every program of every schedule, whatever its plan: what schedules promise, and bounds on its time."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.schedules import Action, Instruction, Kind, Program, compile_program, in_flight
from lightning_gpp.schedules.actions import COLLECTIVES, COPIES
from lightning_gpp.schedules.lowering import samples_of
from lightning_gpp.schedules.verifier import replay
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from lightning_gpp.simulation.simulator import changes
from tests.schedules.random_plans import Case

CLOSE = 1 - 1e-9


def check(case: Case) -> Timeline:
    """Compile and simulate a case.

    Raises:
        AssertionError: the simulation contradicts the schedule's promise, or a bound.
        ScheduleError, PlanError, ConfigError: the case is refused.
    """
    plan = case.plan
    program = compile_program(plan, case.batch_size, case.training, copies=case.copies, reduce=case.reduce)
    timeline = simulate(program, case.costs)
    if case.training:
        promised = in_flight(plan, case.batch_size)
        assert timeline.peak_in_flight == promised, f"in flight {timeline.peak_in_flight}, promised {promised}"
    else:
        assert not any(message.gradient for message in program.messages)
    for device, spans in enumerate(timeline.devices):
        assert all(a.stop <= b.start for a, b in zip(spans, spans[1:], strict=False)), (
            f"device {device} does two at once"
        )
    if case.training and case.reduce:
        for device in range(plan.num_devices):
            left = sum(changes(program, case.costs, device))
            assert abs(left) < 1e-6, f"device {device} keeps {left} bytes after the step"
    work, path = max(works(program, case.costs)), critical_path(program, case.costs)
    assert timeline.makespan >= CLOSE * work, f"makespan {timeline.makespan}, a device works {work}"
    assert timeline.makespan >= CLOSE * path, f"makespan {timeline.makespan}, the longest path {path}"
    return timeline


def works(program: Program, costs: StageCosts) -> list[float]:
    """Seconds that each device computes."""
    rows = enumerate(program.devices)
    return [sum(_seconds(program, costs, device, instruction) for instruction in row) for device, row in rows]


def critical_path(program: Program, costs: StageCosts) -> float:
    """Seconds of the longest path of actions and messages that need each other, if every action had its own device."""
    ends: dict[tuple[int, Action], float] = {}

    def visit(device: int, instruction: Instruction) -> None:
        action = instruction.action
        if action is not None and action.kind not in (*COLLECTIVES, *COPIES):
            before = [ends.get((device, action._replace(kind=kind)), 0.0) for kind in _OWN.get(action.kind, ())]
            ready = max([0.0, *before, *_arrivals(program, costs, device, action, ends)])
            ends[device, action] = ready + _seconds(program, costs, device, instruction)

    replay(program, visit)
    return max(ends.values())


_OWN = {
    Kind.RECOMPUTE: (Kind.FORWARD,),
    Kind.BACKWARD: (Kind.FORWARD, Kind.RECOMPUTE),
    Kind.INPUT: (Kind.FORWARD, Kind.RECOMPUTE),
    Kind.WEIGHT: (Kind.INPUT,),
}
"""The kinds of actions of the same micro-batch that an action needs."""


def _arrivals(
    program: Program, costs: StageCosts, device: int, action: Action, ends: dict[tuple[int, Action], float]
) -> Iterator[float]:
    for number in program.inputs[device, action]:
        message = program.messages[number]
        way = costs.transfer(program.plan, message)[0] if message.src != message.dst else 0.0
        yield ends[message.src, message.producer] + way


def _seconds(program: Program, costs: StageCosts, device: int, instruction: Instruction) -> float:
    action = instruction.action
    if action is None or action.kind in (*COLLECTIVES, *COPIES):
        return 0.0
    samples = samples_of(program.plan, action.stage, device, program.batch_size)
    return costs.seconds(action, device, samples[action.micro_batch])
