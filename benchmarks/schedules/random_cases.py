"""Every schedule on random plans: none may deadlock, break a promise, or raise an unexplained error.

    python -m benchmarks.schedules.random_cases                 10,000 cases compiled, verified and simulated
    python -m benchmarks.schedules.random_cases --run 200       and 200 cases run by real processes
    python -m benchmarks.schedules.random_cases --case 4711     one case: its plan, and its outcome

A case draws a graph of stages, their devices, micro-batch sizes, slices, replicas, recomputation, sharding, pipeline
replicas, memory limits, and known or unknown seconds. It must compile, which verifies it; keep in flight what the
schedule promised; free all memory; and take no less time than its busiest device works, or than its longest path of
dependencies. Real processes must compute the losses and all gradients of one process, to 1e-12. Cases are reproducible
by number.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType

from benchmarks.schedules.outcomes import Outcome, report
from benchmarks.schedules.random_plans import Case, case_of
from lightning_gpp.errors import ConfigError, PlanError, ScheduleError, VerificationError
from lightning_gpp.schedules import Action, Instruction, Kind, Program, compile_program, in_flight
from lightning_gpp.schedules.actions import COLLECTIVES, COPIES
from lightning_gpp.schedules.lowering import samples_of
from lightning_gpp.schedules.verifier import replay
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from lightning_gpp.simulation.simulator import changes

SECONDS_PER_CASE = 60
"""A case that takes longer counts as hanging."""

CLOSE = 1 - 1e-9


def played(number: int) -> Outcome:
    """Make, compile and simulate a case; exceptions become outcomes."""
    start = time.perf_counter()
    case = case_of(number)
    done = partial(Outcome, number=number, schedule=case.plan.schedule)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS_PER_CASE)
    try:
        check(case)
    except VerificationError:
        return done(seconds=time.perf_counter() - start, failure=traceback.format_exc())
    except (ScheduleError, PlanError, ConfigError) as error:
        return done(seconds=time.perf_counter() - start, refusal=f"{type(error).__name__}: {error}")
    except Exception:
        return done(seconds=time.perf_counter() - start, failure=traceback.format_exc())
    finally:
        signal.alarm(0)
    return done(seconds=time.perf_counter() - start)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"The case takes longer than {SECONDS_PER_CASE} s.")


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
            left = sum(change for _, change in changes(program, case.costs, device))
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


def simulated(numbers: Sequence[int], num_processes: int) -> list[Outcome]:
    """Outcomes of cases by number, simulated in several processes."""
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        return list(pool.imap_unordered(played, numbers, chunksize=20))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="to compile and simulate")
    parser.add_argument("--run", type=int, default=0, help="to run by real processes")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(case_of(arguments.case))
        return 0 if report([played(arguments.case)], "cases") else 1
    good = _timed("simulated", arguments, arguments.cases, partial(simulated, num_processes=arguments.processes))
    if arguments.run:
        # Only now: it imports torch.
        from benchmarks.schedules.random_runs import executed

        good &= _timed("executed", arguments, arguments.run, executed)
    return 0 if good else 1


def _timed(what: str, arguments: argparse.Namespace, number: int, play: Callable[[range], Iterable[Outcome]]) -> bool:
    start = time.perf_counter()
    good = report(play(range(arguments.first, arguments.first + number)), what)
    print(f"\n{number} cases {what} in {time.perf_counter() - start:.0f} s\n", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
