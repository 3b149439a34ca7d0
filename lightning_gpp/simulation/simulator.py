"""Simulates a program: the times of actions, transfers and collectives, and the peak memory of devices."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import networkx as nx

from lightning_gpp.cluster import Port
from lightning_gpp.costs.model import held_copies
from lightning_gpp.errors import PlanError, VerificationError
from lightning_gpp.plan import Figures
from lightning_gpp.schedules import Action, Instruction, Kind, Op, Program
from lightning_gpp.schedules.actions import COLLECTIVES, COMPUTING, COPIES, RELEASES
from lightning_gpp.schedules.lowering import all_samples, samples_of
from lightning_gpp.schedules.verifier import replay
from lightning_gpp.schedules.work import Leaving, allocations, peak
from lightning_gpp.simulation.stage_costs import StageCosts
from lightning_gpp.simulation.timeline import Collective, HostCopy, Span, Timeline, Transfer


class Bookings:
    """The busy times of a port: disjoint intervals in order; adjacent ones are joined."""

    __slots__ = ("starts", "stops")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.stops: list[float] = []

    def earliest(self, start: float, seconds: float) -> float:
        """The first time, from `start` on, at which the port is free for `seconds`."""
        for index in range(bisect_left(self.stops, start), len(self.starts)):
            if start + seconds <= self.starts[index]:
                return start
            start = max(start, self.stops[index])
        return start

    def add(self, start: float, seconds: float) -> None:
        """Book a free interval."""
        index = bisect_left(self.starts, start)
        before = index > 0 and self.stops[index - 1] == start
        after = index < len(self.starts) and self.starts[index] == start + seconds
        if before and after:
            self.stops[index - 1] = self.stops.pop(index)
            del self.starts[index]
        elif before:
            self.stops[index - 1] = start + seconds
        elif after:
            self.starts[index] = start
        else:
            self.starts.insert(index, start)
            self.stops.insert(index, start + seconds)


def book(ports: Sequence[Bookings], start: float, seconds: float) -> float:
    """Book the first time, from `start` on, at which all ports are free for `seconds`, and return it."""
    if not ports or not seconds:
        return start
    later = start
    while True:
        start = later
        for port in ports:
            later = port.earliest(later, seconds)
        if later == start:
            break
    for port in ports:
        port.add(start, seconds)
    return start


def peak_bytes(program: Program, costs: StageCosts, device: int) -> float:
    """The most bytes that a device holds at a time.

    Parameters, gradients and optimizer states of its stages count at all times: with ZeRO-1 only its share of the
    states, with fsdp only its shares of all three. So does the mini-batch on the device that loads it. With fsdp, a
    stage's unsharded parameters count from UNSHARD to RESHARD, and its unsharded gradients until REDUCE. In training,
    micro-batches in flight count as in `allocations`, offloaded tensors until the second computing action after their
    OFFLOAD, whenever their copy ends; in inference, activations count during the forward.
    """
    return _static(program, costs, device) + peak(changes(program, costs, device))


def _static(program: Program, costs: StageCosts, device: int) -> float:
    plan = program.plan
    total = costs.loaded_bytes(device)
    for stage in plan.stages_on(device):
        ranks = costs.ranks[stage] if costs.ranks else len(plan.devices_of(stage))
        copies = held_copies(costs.parameter_copies, plan.sharding, ranks)
        total += costs.replica(stage, device).parameter_bytes * copies
    return total


def changes(program: Program, costs: StageCosts, device: int) -> Iterator[float]:
    """The bytes that actions allocate, or free if negative, in the order of the program.

    After a training step all are freed.
    """
    plan = program.plan
    replicas = {stage: costs.replica(stage, device) for stage in plan.stages_on(device)}
    samples = {stage: samples_of(plan, stage, device, program.batch_size) for stage in replicas}
    unreduced: set[int] = set()
    leaving: Leaving[Action, float] = Leaving()
    for instruction in program.devices[device]:
        action = instruction.action
        if action is None or action.kind is Kind.DATA:
            continue
        if action.kind in COMPUTING:
            yield from leaving.compute()
        cost = replicas[action.stage]
        if plan.sharding == "fsdp":
            yield _sharded_change(program, action, cost, unreduced)
        if action.micro_batch < len(samples[action.stage]):
            found = _activations(program, action, cost, samples[action.stage][action.micro_batch])
            yield from found if action.kind not in COPIES else _copied(leaving, action, found)


def _copied(leaving: Leaving[Action, float], action: Action, found: Iterable[float]) -> Iterator[float]:
    """Bytes of a LOAD, unless they are still on the device. Those of an OFFLOAD come later, see `Leaving`."""
    for change in found:
        if action.kind is Kind.OFFLOAD:
            leaving.add(action, change)
        elif not leaving.keep(action.of_kind(Kind.OFFLOAD)):
            yield from leaving.release()
            yield change


def _sharded_change(program: Program, action: Action, cost: Figures, unreduced: set[int]) -> float:
    """Bytes of unsharded parameters and gradients. `unreduced`: stages with gradients since their last REDUCE."""
    if action.kind in (Kind.UNSHARD, Kind.RESHARD):
        return cost.parameter_bytes * (1 if action.kind is Kind.UNSHARD else -1)
    if action.kind is Kind.REDUCE:
        if action.stage not in unreduced:  # the replica had no micro-batch
            return 0.0
        unreduced.discard(action.stage)
        return -cost.parameter_bytes
    if action.kind in RELEASES and action.stage in program.reduced and action.stage not in unreduced:
        unreduced.add(action.stage)
        return cost.parameter_bytes
    return 0.0


_REACH_BLOCKS: Final = (Kind.BACKWARD, Kind.INPUT)
"""Kinds of actions inside of which recomputed blocks run again."""


def _activations(program: Program, action: Action, cost: Figures, num_samples: int) -> Iterator[float]:
    if not num_samples or action.kind in COLLECTIVES:
        return
    stage = program.plan.stages[action.stage]
    change = allocations(cost, num_samples, recomputes=stage.reruns)[action.kind]
    inside = cost.working_bytes.at(num_samples) if stage.recomputed_blocks and action.kind in _REACH_BLOCKS else 0.0
    if inside:
        yield inside
    yield change - inside
    if not program.training:
        yield -change


def simulate(
    program: Program, costs: StageCosts, not_before: Mapping[tuple[int, int], float] = MappingProxyType({})
) -> Timeline:
    """The timeline of a program and its peak memory.

    A device runs its instructions in order; only WAIT makes it wait. A transfer starts when it has been sent, its
    buffer has been posted, the previous transfer between the same two devices in the same direction has ended, and the
    ports that it shares with others are free while its bytes flow. Transfers overlap with computing, and so do
    all-gathers of parameters, until their stage computes, and reductions of gradients, and copies to and from the host,
    for whose ends later actions wait (`schedules.passes`). For memory see `peak_bytes`.

    Args:
        program: a verified program.
        costs: seconds and bytes.
        not_before: earliest starts of actions that compute, by device and their number in its order.

    Raises:
        PlanError: the costs are for another number of stages.
        VerificationError: the program deadlocks.
    """
    if len(costs.stages) != len(program.plan.stages):
        raise PlanError(f"The costs are for {len(costs.stages)} stages, the plan has {len(program.plan.stages)}.")
    run = _Simulation(program, costs, not_before)
    if replay(program, run.visit):
        raise VerificationError("The program deadlocks; verify(program) shows the cycle of waits.")
    devices = tuple(map(tuple, run.spans))
    return Timeline(
        stages=tuple(stage.name for stage in program.plan.stages),
        devices=devices,
        transfers=tuple(sorted(run.transfers, key=lambda transfer: (transfer.start, transfer.message))),
        reductions=tuple(_reductions(run)),
        all_gathers=tuple(run.all_gathers),
        host_copies=tuple(copy for host in run.hosts.values() for copy in host.copies),
        peak_bytes=tuple(peak_bytes(program, costs, device) for device in range(len(devices))),
    )


class HostCopies:
    """The copies between a device and its host; the link has one lane in each direction.

        device   F0  F1  F2  ......B0          copies are twice as long as actions
        out        O0------O1------            F2 waits for the end of O0, B0 for that of L0 and of O1
        in                 L0------

    Attributes:
        copies: all so far, in the order in which they were started.
    """

    def __init__(self, device: int) -> None:
        self.copies: list[HostCopy] = []
        self._device = device
        self._free = {Kind.OFFLOAD: 0.0, Kind.LOAD: 0.0}
        self._leaving: Leaving[Action, float] = Leaving()
        self._ends: dict[Action, float] = {}
        self._left = 0.0  # the time at which the latest tensors left the device

    def start(self, action: Action, time: float, seconds: float, num_bytes: float) -> None:
        """Start an OFFLOAD or LOAD when the device comes to it."""
        offload = action.of_kind(Kind.OFFLOAD)
        if action.kind is Kind.LOAD and self._leaving.keep(offload):
            self._ends[action] = time
            return
        if action.kind is Kind.LOAD:
            time = self._left = max((time, self._left, *self._leaving.release()))
        start = max(time, self._free[action.kind], self._ends.get(offload, 0.0))
        stop = self._ends[action] = self._free[action.kind] = start + seconds
        if seconds:
            self.copies.append(HostCopy(self._device, action, start, stop, num_bytes))
        if action.kind is Kind.OFFLOAD:
            self._leaving.add(action, stop)

    def ready(self, action: Action) -> float:
        """The time from which a computing action may start."""
        self._left = max((self._left, *self._leaving.compute()))
        return max(self._left, self._ends.get(action.of_kind(Kind.LOAD), 0.0))


@dataclass(slots=True)
class _Simulation:
    """The state of all devices, links and ports."""

    program: Program
    costs: StageCosts
    not_before: Mapping[tuple[int, int], float]
    time: list[float] = field(init=False)
    spans: list[list[Span]] = field(init=False)
    samples: dict[tuple[int, int], list[int]] = field(init=False)
    offered: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    free: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    ports: dict[Port, Bookings] = field(default_factory=lambda: defaultdict(Bookings))
    transfers: list[Transfer] = field(default_factory=list)
    reached: list[dict[Action, float]] = field(init=False)
    """Times at which every device reached its reductions."""
    gathered: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """End of every device's latest all-gather."""
    unsharded: dict[tuple[int, int], float] = field(default_factory=dict)
    """Time from which a stage's parameters are unsharded on a device."""
    all_gathers: list[Collective] = field(default_factory=list)
    hosts: dict[int, HostCopies] = field(default_factory=dict)
    """The copies of every device that has any."""

    def __post_init__(self) -> None:
        devices = range(len(self.program.devices))
        self.time, self.spans = [0.0 for _ in devices], [[] for _ in devices]
        self.reached = [{} for _ in devices]
        self.samples = all_samples(self.program.plan, self.program.batch_size)

    def visit(self, device: int, instruction: Instruction) -> None:
        if instruction.action is not None and instruction.action.kind in COLLECTIVES:
            self._start_collective(device, instruction.action)
        elif instruction.action is not None and instruction.action.kind in COPIES:
            self._start_copy(device, instruction.action)
        elif instruction.action is not None:
            self._compute(device, instruction.action)
        elif instruction.message is not None and instruction.op is Op.WAIT:
            self.time[device] = max(self.time[device], self.arrived[instruction.message])
        elif instruction.message is not None:
            self._offer(instruction.message, self.time[device])

    def _compute(self, device: int, action: Action) -> None:
        self._wait_for_parameters(device, action.stage)
        if device in self.hosts and action.kind in COMPUTING:
            self.time[device] = max(self.time[device], self.hosts[device].ready(action))
        floor = self.not_before.get((device, len(self.spans[device])), 0.0)
        start = self.time[device] = max(self.time[device], floor)
        self.time[device] += self.costs.seconds(action, device, self.samples[device, action.stage][action.micro_batch])
        self.spans[device].append(Span(action, start, self.time[device]))

    def _start_copy(self, device: int, action: Action) -> None:
        host = self.hosts.setdefault(device, HostCopies(device))
        samples = self.samples[device, action.stage][action.micro_batch]
        host.start(action, self.time[device], *self.costs.host_copy(action, device, samples))

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
        seconds, flow = self.costs.transfer(self.program.plan, message)
        start = max(self.offered[number], time, self.free[pair])
        start = book([self.ports[port] for port in self.costs.ports(message)], start, flow)
        stop = start + seconds
        self.free[pair] = self.arrived[number] = stop
        edge, num_samples = self.program.plan.edges[message.edge], message.stop - message.start
        ends = message.producer, message.consumer
        self.transfers.append(Transfer(number, *pair, *ends, start, stop, edge.bytes.at(num_samples)))


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
    """Reductions in an order that every device follows, with the times at which devices reached them."""
    order = nx.DiGraph()
    for times in reached:
        order.add_nodes_from(times)
        nx.add_path(order, times)
    for action in nx.topological_sort(order):
        yield action, {device: times[action] for device, times in enumerate(reached) if action in times}
