"""One training run: a task at the delays of a pipeline, on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from benchmarks.quality.one_device import on_one_device
from benchmarks.quality.stages import PartsStage, Stream, computed, plan_of, slots_of
from benchmarks.quality.tasks import TASKS, Samples, Task
from lightning_gpp.runtime import Executor
from lightning_gpp.runtime.weights import make_policy
from lightning_gpp.runtime.weights.policy import update, weights_of
from lightning_gpp.schedules.continuous import continuous_program
from lightning_gpp.schedules.program import Program

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, fused=True),
    "sgd": lambda parameters: SGD(parameters, momentum=0.9, fused=True),
    "nadamw": lambda parameters: NAdam(parameters, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True),
}
WARM_UP, LAST_RATE = 0.1, 0.1
"""Share of the steps in which the rate rises; share of the rate at the end of its cosine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A weight policy, and the mini-batches with a flush after each before it begins. `optimizer`: instead of AdamW."""

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    synchronous_steps: int = 0
    optimizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The identity of a training run; `task`, `optimizer` and `method` are names."""

    task: str
    optimizer: str
    method: str
    num_stages: int
    chain: bool
    rate: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The final loss of a run, of all samples for validation; infinite if one of a mini-batch was not a number."""

    validation: float


@cache
def samples_of(task: str) -> tuple[Samples, Samples]:
    """For training, and for validation."""
    return TASKS[task].load()


@cache
def pipeline_of(task: str, num_stages: int, chain: bool) -> Program:
    """The program of the pipeline whose delays a run has."""
    return continuous_program(plan_of(TASKS[task], num_stages, chain=chain))


@cache
def program_of(task: str, num_stages: int, chain: bool) -> Program:
    """The same on one device."""
    return on_one_device(pipeline_of(task, num_stages, chain))


def train(run: Run, method: Method) -> Outcome:
    """Train from the seed's weights on the seed's mini-batches."""
    task, (samples, validation) = TASKS[run.task], samples_of(run.task)
    modules = task.modules(run.seed)
    if not all(map(math.isfinite, Training(run, method, modules).steps(samples))):
        return Outcome(validation=math.inf)
    return Outcome(validation=_loss_of(task, modules, validation))


class Training:
    """The executor, optimizer and weight policy of a run."""

    def __init__(self, run: Run, method: Method, modules: Mapping[str, nn.Module]) -> None:
        self.run, self.method, self.task = run, method, TASKS[run.task]
        self.program, self.stream = program_of(run.task, run.num_stages, run.chain), Stream()
        groups = self.task.layouts[run.num_stages]
        self.stages = [PartsStage(self.task, group, modules, self.stream) for group in groups]
        by_stage = {i: [p for part in stage.parts for p in part.parameters()] for i, stage in enumerate(self.stages)}
        self.parameters = [parameter for listed in by_stage.values() for parameter in listed]
        self.optimizer = OPTIMIZERS[method.optimizer or run.optimizer](self.parameters)
        weights = weights_of(self.program, 0, by_stage, lambda: [self.optimizer])
        self.policy = make_policy(method.policy, weights, **method.options)

    def steps(self, samples: Samples) -> Iterator[float]:
        """Train; the loss of every mini-batch."""
        task, executor = self.task, self._executor(samples)
        batches = _mini_batches(len(samples), task.batch_size, task.num_steps, self.run.seed)
        for segment in self._segments():
            done = self.policy.updates
            self.policy.begin(lambda batch, s=segment, done=done: done + batch - s.start, segment.start)  # type: ignore[misc]
            for step in segment:
                self._open(step, segment, samples, batches)
                executor.run(loss_weight=1 / task.batch_size, step=step, first=segment.start, last=segment.stop)
                self._update(step)
                yield float(self.stages[-1].loss)

    def _executor(self, samples: Samples) -> Executor:
        return Executor(
            self.program,
            0,
            stages=self.stages,
            slots=slots_of(self.task, self.program.plan, samples),
            transport=None,  # type: ignore[arg-type]  # a device sends itself nothing
            source=self.stream,
            weights=self.policy,
        )

    def _segments(self) -> Iterator[range]:
        """Mini-batches between flushes."""
        begin, end = self.method.synchronous_steps, self.task.num_steps
        yield from (range(step, step + 1) for step in range(begin))
        yield range(begin, end)

    def _open(self, step: int, segment: range, samples: Samples, batches: Tensor) -> None:
        lanes = self.program.lead + 1
        for batch in range(step, min(step + lanes, segment.stop)):
            if batch == step + lanes - 1 or step == segment.start:
                self.stream.open[batch % lanes] = samples.chosen(batches[batch])

    def _update(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.rate * _share_of_rate(step / self.task.num_steps)
        with update(self.policy, self.parameters):
            self.optimizer.step()
        self.optimizer.zero_grad()


def _mini_batches(num_samples: int, batch_size: int, number: int, seed: int) -> Tensor:
    """Numbers of samples, `[number, batch_size]`, epoch by epoch in random order."""
    generator = torch.Generator().manual_seed(seed)
    per_epoch = num_samples // batch_size
    epochs = [torch.randperm(num_samples, generator=generator) for _ in range(-(-number // per_epoch))]
    return torch.cat([epoch[: per_epoch * batch_size] for epoch in epochs]).view(-1, batch_size)[:number]


def _share_of_rate(progress: float) -> float:
    """A linear warm-up, then a cosine."""
    if progress < WARM_UP:
        return progress / WARM_UP
    rest = (progress - WARM_UP) / (1 - WARM_UP)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * rest)) / 2


@torch.no_grad()
def _loss_of(task: Task, modules: Mapping[str, nn.Module], samples: Samples) -> float:
    output = computed(task, modules, samples.inputs)[list(task.parts)[-1]]
    return float(task.loss(output, samples.targets))
