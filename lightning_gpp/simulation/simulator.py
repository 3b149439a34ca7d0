"""Plays a program against a clock."""

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
from lightning_gpp.simulation.timeline import Reduction, Span, Timeline, Transfer


def simulate(program: Program, costs: StageCosts) -> Timeline:
    """When each action of a program runs, and the memory that takes.

    A device runs its instructions in order; only WAIT makes it wait. A transfer starts when it was sent, its buffer was
    posted and the previous transfer between the same two devices, in the same direction, has ended, and when the ports
    that it shares with others are free for as long as its bytes flow; it overlaps with computing. So do gatherings of
    parameters, until their stage is to compute, and sums of gradients. For memory see `peak_bytes`.

    Args:
        program: a verified one.
        costs: seconds and bytes.

    Raises:
        PlanError: the costs are for another number of stages.
        VerificationError: the program hangs.
    """
    if len(costs.stages) != len(program.plan.stages):
        raise PlanError(f"The costs are for {len(costs.stages)} stages, the plan has {len(program.plan.stages)}.")
    clock = _Clock(program, costs)
    if replay(program, clock.visit):
        raise VerificationError("The program hangs; verify(program) tells where.")
    devices = tuple(map(tuple, clock.spans))
    return Timeline(
        stages=tuple(stage.name for stage in program.plan.stages),
        devices=devices,
        transfers=tuple(sorted(clock.transfers, key=lambda transfer: (transfer.start, transfer.message))),
        reductions=tuple(_reductions(clock)),
        gatherings=tuple(clock.gatherings),
        peak_bytes=tuple(peak_bytes(program, costs, device) for device in range(len(devices))),
    )


@dataclass(slots=True)
class _Clock:
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
    sums: list[dict[Action, float]] = field(init=False)
    gathered: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    whole: dict[tuple[int, int], float] = field(default_factory=dict)
    gatherings: list[Reduction] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan, devices = self.program.plan, range(len(self.program.devices))
        self.time, self.spans = [0.0 for _ in devices], [[] for _ in devices]
        self.sums = [{} for _ in devices]
        self.samples = {
            (device, stage): samples_of(plan, stage, device, self.program.batch_size)
            for device in devices
            for stage in plan.stages_on(device)
        }

    def visit(self, device: int, instruction: Instruction) -> None:
        if instruction.action is not None and instruction.action.kind in COLLECTIVES:
            self._meet(device, instruction.action)
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

    def _meet(self, device: int, action: Action) -> None:
        if action.kind is Kind.REDUCE:
            self.sums[device][action] = self.time[device]
        elif action.kind is Kind.UNSHARD:
            start = max(self.time[device], self.gathered[device])
            self.gathered[device] = start + self.costs.meeting(action, sharded=True)
            self.whole[device, action.stage] = self.gathered[device]
            if self.gathered[device] > start:
                self.gatherings.append(Reduction(action.stage, (device,), start, self.gathered[device]))

    def _wait_for_parameters(self, device: int, stage: int) -> None:
        self.time[device] = max(self.time[device], self.whole.get((device, stage), 0))

    def _offer(self, number: int, time: float) -> None:
        """A send or a post: the second one of a message settles when it travels."""
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


def _reductions(clock: _Clock) -> Iterator[Reduction]:
    """Sums of gradients: each starts when all its devices have come to it, and are done with the one before."""
    free = [0.0 for _ in clock.time]
    sharded = clock.program.plan.sharding == "fsdp"
    for action, offers in _in_order(clock.sums):
        seconds = clock.costs.meeting(action, sharded)
        start = max(max(time, free[device]) for device, time in offers.items())
        for device in offers:
            free[device] = start + seconds
        if seconds:
            yield Reduction(action.stage, tuple(offers), start, start + seconds)


def _in_order(sums: Sequence[dict[Action, float]]) -> Iterator[tuple[Action, dict[int, float]]]:
    """The meetings in an order that every device follows, with the time at which each of its devices came to it."""
    order = nx.DiGraph()
    for offered in sums:
        order.add_nodes_from(offered)
        nx.add_path(order, offered)
    for action in nx.topological_sort(order):
        yield action, {device: offered[action] for device, offered in enumerate(sums) if action in offered}
