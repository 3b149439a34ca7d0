"""Random cases in real processes: four processes run many cases in turn; hanging ones are reported and replaced."""

from __future__ import annotations

import faulthandler
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_gpp.runtime import DistributedTransport, Executor, GradientSync, Mesh, pairs_of
from lightning_gpp.runtime.sharding import ShardedStages, StageSync
from lightning_gpp.schedules import Program, compile_program
from tests import distributed
from tests.runtime import cases
from tests.runtime.cases import Case, part_of
from tests.runtime.stages import Mixer, all_slots, holders_of, local_parameters, make_stages, named_parameters
from tests.schedules.random_plans import Limits, case_of

distributed.preload(__name__)

NUM_PROCESSES = 4
LIMITS = Limits(max_stages=7, max_devices=NUM_PROCESSES, max_batch=12, uncut=False)


def real_case(number: int) -> Case:
    """Case `number`, in training, with as many pipeline replicas as there are processes for.

    Every third accumulates two mini-batches; every fourth has, if possible, a parameter that the first and the last
    stage share. The stages here are separate modules, whose parameters cannot be both shared and sharded, so plans with
    slices are not sharded.
    """
    case = case_of(number, LIMITS)
    plan = case.plan
    if plan.is_sliced and plan.sharding == "fsdp":
        plan = replace(plan, sharding="none")
    return Case(
        plan,
        case.batch_size,
        num_pipelines=min(case.copies, NUM_PROCESSES // plan.num_devices),
        tied=plan.sharding != "fsdp" and number % 4 == 0,
        num_runs=1 + (number % 3 == 0),
    )


def execute(workers: Workers, number: int, seconds: float = 60.0) -> None:
    """Run a case; losses and gradients are those of one process."""
    case = real_case(number)
    program = compile_program(case.plan, case.batch_size, copies=case.num_pipelines)
    num_ranks = case.plan.num_devices * case.num_pipelines
    check(case, workers.run(num_ranks, seconds, run_on_rank, case, program))


def run_on_rank(rank: int, case: Case, program: Program) -> cases.Outcome:
    """Run one rank's part of a case; the program's collectives unshard parameters and reduce gradients."""
    plan = case.plan
    mesh = Mesh(plan.num_devices, case.num_pipelines, rank)
    stages = make_stages(plan, case.tied)
    sync = sync_of(case, stages, mesh)
    executor = Executor(
        program,
        mesh.device,
        stages=stages,
        slots=all_slots(plan),
        transport=DistributedTransport(mesh, pairs_of(plan)),
        source=part_of(case, mesh.pipeline),
        pipeline=mesh.pipeline,
        sharding=sync,
    )
    for step in range(1, case.num_runs + 1):  # the same samples again, with their share of the weight
        sync.last = step == case.num_runs
        executor.run(loss_weight=1 / (case.batch_size * case.num_pipelines * case.num_runs))
    sync.sync()
    assert not executor.not_split, executor.not_split
    return cases.Outcome(
        losses=stages[plan.step_stage].losses,
        gradients={name: shard_of(p.grad) for name, p in local_parameters(plan, stages, mesh.device).items()},
        norm=float(sync.grad_norm()),
        peak_alive={stage: stages[stage].peak_alive for stage in plan.stages_on(mesh.device)},
    )


def sync_of(case: Case, stages: list[Mixer], mesh: Mesh) -> StageSync:
    """The `StageSync` of unsharded or sharded replicas. ZeRO-1 reduces gradients like replicas without it."""
    plan = case.plan
    parameters = local_parameters(plan, stages, mesh.device)
    holders = holders_of(plan, stages, case.num_pipelines)
    stage_of: dict[str, tuple[int, ...]] = {}
    for stage, named in named_parameters(stages).items():
        stage_of.update({name: (*stage_of.get(name, ()), stage) for name in named})
    if plan.sharding != "fsdp":
        return GradientSync(parameters, holders, mesh, stages=stage_of)
    module = nn.ModuleDict({f"stage{index}": stage for index, stage in enumerate(stages)})
    return ShardedStages(module, parameters, holders, mesh, stages=stage_of)


@dataclass(frozen=True, slots=True)
class Shard:
    """One replica's rows of a gradient; the caller joins them, as DTensors refer to groups of earlier cases."""

    rows: Tensor


def shard_of(gradient: Tensor | None) -> Tensor | Shard | None:
    return Shard(gradient.to_local()) if isinstance(gradient, DTensor) else gradient


def check(case: Case, outcomes: Sequence[cases.Outcome]) -> None:
    """Compare losses, gradients and their norm with one process."""
    cases.check(case, [replace(outcome, gradients=_whole(case, outcome, outcomes)) for outcome in outcomes])


def _whole(case: Case, outcome: cases.Outcome, outcomes: Sequence[cases.Outcome]) -> dict[str, Tensor | None]:
    """The gradients of a rank, with the rows of other ranks."""

    def joined(name: str, gradient: Tensor | Shard | None) -> Tensor | None:
        if not isinstance(gradient, Shard):
            return gradient
        return torch.cat([other.gradients[name].rows for other in outcomes if name in other.gradients])

    return {name: joined(name, gradient) for name, gradient in outcome.gradients.items()}


class Workers:
    """Processes that form a new gloo group, of any number of ranks, for every call."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Workers:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, num_ranks: int, seconds: float, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, *arguments)` on the first processes; their results, by rank.

        Raises:
            RuntimeError: a rank failed, with its traceback, or did not end in time, with its stack. Then all processes
                are replaced.
        """
        payload = pickle.dumps((function, arguments))
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:num_ranks]):
                pipe.send((rank, num_ranks, folder, seconds, payload))
            reports = self._collect(num_ranks, time.monotonic() + seconds)
            if all(report is not None and report[0] for report in reports):
                return [pickle.loads(report[1]) for report in reports if report is not None]
            self._stop()
            self._start()
            raise RuntimeError("\n".join(_trouble(rank, report, folder) for rank, report in enumerate(reports)))

    def _collect(self, num_ranks: int, deadline: float) -> list[tuple[bool, Any] | None]:
        reports: list[tuple[bool, Any] | None] = [None] * num_ranks
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:num_ranks])}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), deadline - time.monotonic()):
                assert isinstance(pipe, Connection)
                report = reports[waiting.pop(pipe)] = _received(pipe)
                if not report[0]:  # the others may wait for this one forever
                    deadline = min(deadline, time.monotonic() + 2)
        return reports

    def _start(self) -> None:
        for _ in range(self._number):
            ours, theirs = distributed.CONTEXT.Pipe()
            process = distributed.CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._pipes.clear()


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        succeeded, content = pipe.recv()
    except EOFError:
        return False, "The process ended without a report."
    return succeeded, content


def _trouble(rank: int, report: tuple[bool, Any] | None, folder: str) -> str:
    if report is None:
        stacks = Path(folder) / f"stacks{rank}"
        return f"rank {rank} did not end:\n{stacks.read_text() if stacks.exists() else ''}"
    return f"rank {rank} ended" if report[0] else f"rank {rank}:\n{report[1]}"


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        try:
            rank, num_ranks, folder, seconds, payload = pipe.recv()
        except EOFError:
            return
        try:
            with _group(rank, num_ranks, folder, seconds):
                function, arguments = pickle.loads(payload)
                report = True, pickle.dumps(function(rank, *arguments))
        except BaseException:
            report = False, traceback.format_exc()
        pipe.send(report)


@contextmanager
def _group(rank: int, num_ranks: int, folder: str, seconds: float) -> Iterator[None]:
    with open(f"{folder}/stacks{rank}", "w") as stacks:
        faulthandler.dump_traceback_later(0.5 * seconds, file=stacks)
        method, timeout = f"file://{folder}/rendezvous", timedelta(seconds=seconds)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=num_ranks, timeout=timeout)
        try:
            yield
            dist.barrier()
        finally:
            dist.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()
