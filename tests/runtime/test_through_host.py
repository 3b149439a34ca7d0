"""Mini-batches that run something for the first time send through host memory, and those after them directly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gpp.plan import Plan
from lightning_gpp.runtime import DistributedTransport, Executor, Mesh, Transport, pairs_of
from lightning_gpp.runtime.bubbles import Work
from lightning_gpp.runtime.recorded import WARM, Recording
from lightning_gpp.schedules import compile_program
from lightning_gpp.schedules.continuous import continuous_program
from tests.distributed import run_distributed
from tests.runtime.asynchronous import AsyncCase, Run
from tests.runtime.stages import all_slots, local_parameters, make_data, make_stages
from tests.runtime.tape import Tape
from tests.strategies import plan_of

HOST, DIRECT = "through host memory", "directly"
PLAN = plan_of([(0, 1), (0, 2), (1, 2)], [2, 2, 2], 8, devices=[(0,), (1,), (2,)], data=True)


@dataclass
class Noting:
    """A transport that notes the way of every message, for the mini-batch that is under way."""

    transport: Transport
    ways: list[str] = field(default_factory=list)
    way: str = DIRECT

    @property
    def through_host(self) -> Transport:
        return Noting(self.transport.through_host, self.ways, HOST)

    def send(self, tensor: Tensor, device: int) -> Work:
        self.ways.append(self.way)
        return self.transport.send(tensor, device)

    def receive(self, buffer: Tensor, device: int) -> Work:
        self.ways.append(self.way)
        return self.transport.receive(buffer, device)

    def taken(self) -> set[str]:
        """The ways since the last call."""
        found = set(self.ways)
        self.ways.clear()
        return found


def _run(rank: int, plan: Plan, sizes: tuple[int, ...]) -> tuple[list[set[str]], list[dict[str, Tensor]]]:
    mesh = Mesh(plan.num_devices, 1, rank)
    noting = Noting(DistributedTransport(mesh, pairs_of(plan), own_groups=True))
    stages, executors = make_stages(plan), {}
    parameters, ways, gradients = local_parameters(plan, stages, rank), [], []
    for size in sizes:
        if size not in executors:
            program, source = compile_program(plan, size), make_data(size)
            executors[size] = Executor(
                program, rank, stages=stages, slots=all_slots(plan), transport=noting, source=source
            )
        for parameter in parameters.values():
            parameter.grad = None
        executors[size].run(loss_weight=1 / size)
        ways.append(noting.taken())
        gradients.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
    return ways, gradients


def test_the_first_mini_batch_of_a_size_goes_through_the_host() -> None:
    for ways, gradients in run_distributed(3, _run, PLAN, (8, 8, 4, 8, 4)):
        assert ways == [{HOST}, {DIRECT}, {HOST}, {DIRECT}, {DIRECT}]
        for first, later in ((0, 1), (0, 3), (2, 4)):
            for name, gradient in gradients[first].items():
                assert torch.equal(gradient, gradients[later][name]), name


class _Unused(Tape):
    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        raise AssertionError("these stages are not recorded")


def _recorded(rank: int, plan: Plan) -> list[set[str]]:
    mesh, stages = Mesh(plan.num_devices, 1, rank), make_stages(plan)
    noting, ways = Noting(DistributedTransport(mesh, pairs_of(plan), own_groups=True)), []
    executor = Executor(
        compile_program(plan),
        rank,
        stages=stages,
        slots=all_slots(plan),
        transport=noting,
        source=make_data(8),
        recording=Recording(recorder=_Unused()),
    )
    for _ in range(WARM + 2):
        executor.run(loss_weight=1 / 8)
        ways.append(noting.taken())
    return ways


def test_the_mini_batch_that_first_repeats_records_goes_through_the_host() -> None:
    for ways in run_distributed(3, _recorded, PLAN):
        assert ways == [{HOST}] * (WARM + 1) + [{DIRECT}]


def _stream(rank: int, case: AsyncCase) -> tuple[int, list[str]]:
    mesh = Mesh(case.plan.num_devices, 1, rank)
    program, stages = continuous_program(case.plan), make_stages(case.plan)
    noting = Noting(DistributedTransport(mesh, pairs_of(case.plan), own_groups=True))
    run = Run(case, program, rank, stages, [0])
    run.add(0, transport=noting)
    run.train(lambda: None)
    return program.lead, noting.ways


def test_without_a_flush_the_mini_batches_of_the_fill_do() -> None:
    case = AsyncCase(PLAN, "stash", segments=(7, 3))
    for lead, ways in run_distributed(3, _stream, case):
        assert lead > 0
        assert len(ways) % 10 == 0
        assert ways.count(HOST) == (1 + lead) * len(ways) // 10
