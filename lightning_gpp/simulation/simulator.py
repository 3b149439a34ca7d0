"""Simulates a program: the times of actions, transfers and collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx

from lightning_gpp.cluster import Port
from lightning_gpp.errors import PlanError, VerificationError
from lightning_gpp.schedules import Action, Instruction, Kind, Op, Program
from lightning_gpp.schedules.actions import COLLECTIVES
from lightning_gpp.schedules.messages import samples_of
from lightning_gpp.schedules.replay import replay
from lightning_gpp.simulation.memory import peak_bytes
from lightning_gpp.simulation.ports import Bookings, book
from lightning_gpp.simulation.stage_costs import StageCosts
from lightning_gpp.simulation.timeline import Collective, Span, Timeline, Transfer


def simulate(program: Program, costs: StageCosts) -> Timeline:
    """The timeline of a program and its peak memory.

    A device runs its instructions in order; only WAIT makes it wait. A transfer starts when it was sent, its buffer was
    posted, the previous transfer between the same two devices in the same direction has ended, and the ports that it
    shares with others are free while its bytes flow; it overlaps with computing. So do all-gathers of parameters, until
    their stage computes, and reductions of gradients. For memory see `peak_bytes`.

    Args:
        program: a verified one.
        costs: seconds and bytes.

    Raises:
        PlanError: the costs are for another number of stages.
        VerificationError: the program hangs.
    """
    if len(costs.stages) != len(program.plan.stages):
        raise PlanError(f"The costs are for {len(costs.stages)} stages, the plan has {len(program.plan.stages)}.")
    run = _Simulation(program, costs)
    if replay(program, run.visit):
        raise VerificationError("The program deadlocks; verify(program) shows the cycle of waits.")
    devices = tuple(map(tuple, run.spans))
    return Timeline(
        stages=tuple(stage.name for stage in program.plan.stages),
        devices=devices,
        transfers=tuple(sorted(run.transfers, key=lambda transfer: (transfer.start, transfer.message))),
        reductions=tuple(_reductions(run)),
        all_gathers=tuple(run.all_gathers),
        peak_bytes=tuple(peak_bytes(program, costs, device) for device in range(len(devices))),
    )


@dataclass(slots=True)
class _Simulation:
    """The state of all devices, links and ports."""

    program: Program
    costs: StageCosts
    time: list[float] = field(init=False)
    spans: list[list[Span]] = field(init=False)
    samples: dict[tuple[int, int], list[int]] = field(init=False)
    offered: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    free: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    ports: dict[Port, Bookings] = field(default_factory=lambda: defaultdict(Bookings))
    transfers: list[Transfer] = field(default_factory=list)
    reached: list[dict[Action, float]] = field(init=False)
    """For every device the times at which it reached its reductions."""
    gathered: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """For every device the end of its latest all-gather."""
    unsharded: dict[tuple[int, int], float] = field(default_factory=dict)
    """Time from which a stage's parameters are unsharded on a device."""
    all_gathers: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan, devices = self.program.plan, range(len(self.program.devices))
        self.time, self.spans = [0.0 for _ in devices], [[] for _ in devices]
        self.reached = [{} for _ in devices]
        self.samples = {
            (device, stage): samples_of(plan, stage, device, self.program.batch_size)
            for device in devices
            for stage in plan.stages_on(device)
        }

    def visit(self, device: int, instruction: Instruction) -> None:
        if instruction.action is not None and instruction.action.kind in COLLECTIVES:
            self._start_collective(device, instruction.action)
        elif instruction.action is not None:
            self._wait_for_parameters(device, instruction.action.stage)
            samples = self.samples[device, instruction.action.stage][instruction.action.micro_batch]
            start = self.time[device]
            self.time[device] += self.costs.seconds(instruction.action, device, samples)
            self.spans[device].append(Span(instruction.action, start, self.time[device]))
        elif instruction.message is not None and instruction.op is Op.WAIT:
            self.time[device] = max(self.time[device], self.arrived[instruction.message])
        elif instruction.message is not None:
            self._offer(instruction.message, self.time[device])

    def _start_collective(self, device: int, action: Action) -> None:
        if action.kind is Kind.REDUCE:
            self.reached[device][action] = self.time[device]
        elif action.kind is Kind.UNSHARD:
            start = max(self.time[device], self.gathered[device])
            self.gathered[device] = start + self.costs.collective_seconds(action, sharded=True)
            self.unsharded[device, action.stage] = self.gathered[device]
            if self.gathered[device] > start:
                self.all_gathers.append(Collective(action.stage, (device,), start, self.gathered[device]))

    def _wait_for_parameters(self, device: int, stage: int) -> None:
        self.time[device] = max(self.time[device], self.unsharded.get((device, stage), 0))

    def _offer(self, number: int, time: float) -> None:
        """Record a send or a post. The second of the two fixes the time of the transfer."""
        if number not in self.offered:
            self.offered[number] = time
            return
        message = self.program.messages[number]
        pair = message.src, message.dst
        latency, flow = self.costs.transfer(self.program.plan, message)
        start = max(self.offered[number], time, self.free[pair])
        start = book([self.ports[port] for port in self.costs.ports(message)], start, flow)
        stop = start + latency + flow
        self.free[pair] = self.arrived[number] = stop
        self.transfers.append(Transfer(number, *pair, message.producer, message.consumer, start, stop))


def _reductions(run: _Simulation) -> Iterator[Collective]:
    """Reductions of gradients. Each starts when all its devices have reached it and ended the one before."""
    free = [0.0 for _ in run.time]
    sharded = run.program.plan.sharding == "fsdp"
    for action, times in _in_order(run.reached):
        seconds = run.costs.collective_seconds(action, sharded)
        start = max(max(time, free[device]) for device, time in times.items())
        for device in times:
            free[device] = start + seconds
        if seconds:
            yield Collective(action.stage, tuple(times), start, start + seconds)


def _in_order(reached: Sequence[dict[Action, float]]) -> Iterator[tuple[Action, dict[int, float]]]:
    """Reductions in an order that every device follows, with the time at which each device reached them."""
    order = nx.DiGraph()
    for times in reached:
        order.add_nodes_from(times)
        nx.add_path(order, times)
    for action in nx.topological_sort(order):
        yield action, {device: times[action] for device, times in enumerate(reached) if action in times}
