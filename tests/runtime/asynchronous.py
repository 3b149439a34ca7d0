"""Runs of continuous programs by real processes, and by one process with the same delays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.quality.one_device import on_one_device
from lightning_gpp.plan import Plan
from lightning_gpp.runtime import DistributedTransport, Executor, GradientSync, Mesh, MicroBatch, pairs_of
from lightning_gpp.runtime.weights import Use, WeightPolicy, Weights, make_policy
from lightning_gpp.runtime.weights.policy import update, weights_of
from lightning_gpp.schedules.continuous import continuous_program
from lightning_gpp.schedules.program import Program
from tests.distributed import run_each
from tests.runtime.stages import (
    Data,
    all_slots,
    holders_of,
    local_parameters,
    make_data,
    make_stages,
    named_parameters,
)

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


@dataclass(frozen=True)
class AsyncCase:
    """A run of `segments` (numbers of mini-batches between flushes) under a weight policy."""

    plan: Plan
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "momentum"
    segments: tuple[int, ...] = (7, 3)
    every: int = 1
    num_pipelines: int = 1


@dataclass
class AsyncOutcome:
    """What a process saw."""

    weights: dict[str, Tensor]
    losses: dict[int, dict[int, tuple[float, int]]]
    log: list[tuple[int, int, int, str, int]]
    most_bytes: int = 0
    own_bytes: int = 0


@dataclass
class Stream:
    """The mini-batches that are open, by lane."""

    open: dict[int, Data] = field(default_factory=dict)

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return self.open[micro_batch.lane].inputs(micro_batch)


def on_rank(rank: int, case: AsyncCase) -> AsyncOutcome:
    """The case's part of one process."""
    plan = case.plan
    mesh = Mesh(plan.num_devices, case.num_pipelines, rank)
    program = continuous_program(plan, num_pipelines=case.num_pipelines)
    stages = make_stages(plan)
    parameters = local_parameters(plan, stages, mesh.device)
    sync = GradientSync(parameters, holders_of(plan, stages, case.num_pipelines), mesh)
    run = Run(case, program, mesh.device, stages, [mesh.pipeline])
    run.add(mesh.pipeline, transport=DistributedTransport(mesh, pairs_of(plan)))
    return run.train(sync.sync)


def delayed(case: AsyncCase) -> AsyncOutcome:
    """The whole case in this process, on one device."""
    program = on_one_device(continuous_program(case.plan))
    run = Run(case, program, 0, make_stages(program.plan), range(case.num_pipelines))
    for pipeline in run.pipelines:
        run.add(pipeline)
    return run.train(lambda: None)


@dataclass
class OfPipeline:
    """The policy of a device that does the work of several pipelines, for one of them.

    `first`: for every stage the number of its first micro-batch among those of all pipelines.
    `log`: gets every use as stage, mini-batch, micro-batch, "F" or "B", and version of the weights.
    """

    policy: WeightPolicy
    first: Mapping[int, int]
    log: list[tuple[int, int, int, str, int]]

    @property
    def rewrites(self) -> bool:
        return self.policy.rewrites

    @property
    def newest_graphs(self) -> bool:
        return self.policy.newest_graphs

    def enter_forward(self, use: Use) -> None:
        self.policy.enter_forward(self._of_all(use))
        self._note(self._of_all(use), "F")

    def leave_forward(self, use: Use) -> None:
        self.policy.leave_forward(self._of_all(use))

    def enter_backward(self, use: Use) -> None:
        self.policy.enter_backward(self._of_all(use))
        self._note(self._of_all(use), "B")

    def leave_backward(self, use: Use) -> None:
        self.policy.leave_backward(self._of_all(use))

    def _note(self, use: Use, kind: str) -> None:
        versions: Mapping[tuple[int, ...], int] = getattr(self.policy, "_used", {})
        self.log.append((*use[:3], kind, versions.get(use[:3], self.policy.updates)))

    def _of_all(self, use: Use) -> Use:
        return use._replace(micro_batch=use.micro_batch + self.first[use.stage])


class Run:
    """The training of one device, for its own pipeline or, one after the other, for several."""

    def __init__(
        self, case: AsyncCase, program: Program, device: int, stages: list[Any], pipelines: Sequence[int]
    ) -> None:
        self.case, self.program, self.device, self.stages, self.pipelines = case, program, device, stages, pipelines
        self.named = local_parameters(program.plan, stages, device)
        here = named_parameters(stages)
        self.parameters = {stage: list(here[stage].values()) for stage in program.plan.stages_on(device)}
        self.optimizer = OPTIMIZERS[case.optimizer](list(self.named.values()))
        weights = weights_of(program, device, self.parameters, lambda: [self.optimizer])
        self.policy = make_policy(case.policy, self._of_all_pipelines(weights), **case.options)
        self.outcome = AsyncOutcome({}, {}, [], own_bytes=sum(p.nbytes for p in self.named.values()))
        self.parts: list[tuple[int, Stream, Executor]] = []

    def _of_all_pipelines(self, weights: Weights) -> Weights:
        places = range(len(self.pipelines))
        return replace(
            weights,
            accumulated=self.case.every,
            micro_batches={
                stage: [number + place * self._count(stage) for place in places for number in numbers]
                for stage, numbers in weights.micro_batches.items()
            },
            entry={
                (stage, number + place * self._count(stage)): most
                for (stage, number), most in weights.entry.items()
                for place in places
            },
        )

    def _count(self, stage: int) -> int:
        return len(self.program.plan.intervals(stage))

    def add(self, pipeline: int, transport: Any = None) -> None:
        """Work for a pipeline, too."""
        source = Stream()
        first = {stage: self.pipelines.index(pipeline) * self._count(stage) for stage in self.parameters}
        executor = Executor(
            self.program,
            self.device,
            stages=self.stages,
            slots=all_slots(self.program.plan),
            source=source,
            pipeline=pipeline,
            weights=OfPipeline(self.policy, first, self.outcome.log),
            transport=transport,
        )
        self.parts.append((pipeline, source, executor))

    def train(self, sync: Callable[[], None]) -> AsyncOutcome:
        case, outcome = self.case, self.outcome
        step = 0
        for number in case.segments:
            segment = range(step, step + number)
            self.policy.begin(_updates_before(segment.start, self.policy.updates, case.every), segment.start)
            for step in segment:
                self._run(step, segment)
                if (step + 1 - segment.start) % case.every == 0 or step + 1 == segment.stop:
                    sync()
                    self._update()
            step = segment.stop
        outcome.weights = {name: parameter.detach().clone() for name, parameter in self.named.items()}
        return outcome

    def _run(self, step: int, segment: range) -> None:
        plan, lanes, losses = self.program.plan, self.program.lead + 1, self.stages[self.program.plan.step_stage].losses
        weight = 1 / (plan.batch_size * self.case.num_pipelines * self.case.every)
        seen = self.outcome.losses[step] = {}
        for pipeline, source, executor in self.parts:
            losses.clear()
            for batch in range(step, min(step + lanes, segment.stop)):
                source.open[batch % lanes] = make_data(plan.batch_size, seed=1000 * pipeline + batch)
            executor.run(loss_weight=weight, step=step, first=segment.start, last=segment.stop)
            seen |= {start + pipeline * plan.batch_size: loss for start, loss in losses.items()}

    def _update(self) -> None:
        with update(self.policy, list(self.named.values())):
            self.optimizer.step()
        self.optimizer.zero_grad()
        kept = (value.nbytes for values in self.policy.saved().values() for value in values.values() if value.dim())
        self.outcome.most_bytes = max(self.outcome.most_bytes, sum(kept))


def _updates_before(first: int, updates: int, every: int) -> Callable[[int], int]:
    return lambda batch: updates + (batch - first) // every


def run_all(cases: list[AsyncCase]) -> list[list[AsyncOutcome]]:
    """Cases that need the same number of processes, by the same processes; for each case what every rank saw."""
    return run_each(cases[0].plan.num_devices * cases[0].num_pipelines, on_rank, [(case,) for case in cases])
