"""Plays a program against a clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_gpp.cluster import Port
from lightning_gpp.errors import PlanError, VerificationError
from lightning_gpp.schedules import Instruction, Kind, Op, Program
from lightning_gpp.schedules.messages import samples_of
from lightning_gpp.schedules.replay import replay
from lightning_gpp.simulation.ports import Bookings, book
from lightning_gpp.simulation.stage_costs import StageCosts
from lightning_gpp.simulation.timeline import Reduction, Span, Timeline, Transfer


def simulate(program: Program, costs: StageCosts) -> Timeline:
    """When each action of a program runs, and the memory that takes.

    A device runs its instructions in order; only WAIT makes it wait. A transfer starts when it was sent, its buffer was
    posted and the previous transfer between the same two devices, in the same direction, has ended, and when the ports
    that it shares with others are free for as long as its bytes flow; it overlaps with computing. A micro-batch's
    activations live from the start of its forward to the end of its backward (in inference, of its forward). Gradients
    of replicas are summed when all actions have ended.

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
        peak_bytes=tuple(_peak_bytes(clock, device) for device in range(len(devices))),
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

    def __post_init__(self) -> None:
        plan, devices = self.program.plan, range(len(self.program.devices))
        self.time, self.spans = [0.0 for _ in devices], [[] for _ in devices]
        self.samples = {
            (device, stage): samples_of(plan, stage, device, self.program.batch_size)
            for device in devices
            for stage in plan.stages_on(device)
        }

    def visit(self, device: int, instruction: Instruction) -> None:
        if instruction.action is not None:
            samples = self.samples[device, instruction.action.stage][instruction.action.micro_batch]
            start = self.time[device]
            self.time[device] += self.costs.seconds(instruction.action, device, samples)
            self.spans[device].append(Span(instruction.action, start, self.time[device]))
        elif instruction.message is not None and instruction.op is Op.WAIT:
            self.time[device] = max(self.time[device], self.arrived[instruction.message])
        elif instruction.message is not None:
            self._offer(instruction.message, self.time[device])

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
    """Gradients are summed when all actions have ended, stage after stage, as the runtime does it."""
    plan = clock.program.plan
    for stage, seconds in enumerate(clock.costs.all_reduce if clock.program.training else ()):
        if seconds:
            devices = plan.devices_of(stage)
            start = max(clock.time[device] for device in devices)
            for device in devices:
                clock.time[device] = start + seconds
            yield Reduction(stage, devices, start, start + seconds)


def _peak_bytes(clock: _Clock, device: int) -> float:
    costs = {stage: clock.costs.replica(stage, device) for stage in clock.program.plan.stages_on(device)}
    static = sum(cost.parameter_bytes for cost in costs.values()) * clock.costs.parameter_copies
    now = most = 0.0
    for span in clock.spans[device]:
        cost = costs[span.action.stage]
        samples = clock.samples[device, span.action.stage][span.action.micro_batch]
        size = cost.activation_bytes.at(samples) if samples else 0.0
        working = cost.working_bytes.at(samples) if samples and span.action.kind is Kind.BACKWARD else 0.0
        now += size if span.action.kind is Kind.FORWARD else 0
        most = max(most, now + working)
        now -= size if span.action.kind is _last_kind(clock.program) else 0
    return static + most


def _last_kind(program: Program) -> Kind:
    """The kind of action after which a micro-batch is no longer in flight."""
    return Kind.BACKWARD if program.training else Kind.FORWARD
