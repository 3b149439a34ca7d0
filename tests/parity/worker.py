"""One rank of a parity run: stages in this process against the whole model in this process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_gpp.capture import Capture, batch_size_of, capture_step, slice_batch
from lightning_gpp.capture.loss import loss_of
from lightning_gpp.plan import Plan
from lightning_gpp.runtime import DistributedTransport, Executor, GradientSync, Mesh, RandomStreams, pairs_of
from lightning_gpp.schedules import compile_program
from lightning_gpp.stages import build
from tests.parity.layouts import Layout, plan_of
from tests.parity.models import Subject, subject

SCHEDULES = ("gpipe", "1f1b")
CLIP = 0.1


def run_layouts(rank: int, name: str, layouts: Mapping[str, Layout]) -> None:
    """All layouts with both schedules: loss and every gradient of this rank, to 1e-12 relative."""
    found = subject(name)
    for label, layout in layouts.items():
        batch = _part(found.batch, rank, layout)
        captured = capture_step(found.module, batch)
        for schedule in SCHEDULES:
            plan = plan_of(captured, found, layout, schedule)
            run = Rank(rank, found, captured, plan, layout)
            run.train(batch, 0)
            run.check_gradients(f"{name}, {label}, {schedule}")


def run_steps(rank: int, name: str, layout: Layout, num_steps: int) -> None:
    """Adam steps with clipping by the global norm: every parameter of this rank, to 1e-9 relative."""
    found = subject(name)
    captured = capture_step(found.module, found.batch)
    run = Rank(rank, found, captured, plan_of(captured, found, layout, "1f1b"), layout)
    reference = copy.deepcopy(found.module)
    ours = torch.optim.Adam(run.parameters.values(), lr=1e-3)
    theirs = torch.optim.Adam(reference.parameters(), lr=1e-3)
    for number in range(num_steps):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        run.train(found.batch, number)
        norm = run.sync.grad_norm()
        nn.utils.clip_grads_with_norm_(run.parameters.values(), CLIP, norm)
        _whole(reference, found.batch, run.plan, 1.0)
        whole_norm = nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        assert abs(norm - whole_norm) <= 1e-9 * whole_norm, (number, norm, whole_norm)
        ours.step()
        theirs.step()
    expected = dict(reference.named_parameters())
    for label, parameter in run.parameters.items():
        _close(parameter.data, expected[label].data, 1e-9, f"{name}: {label} after {num_steps} steps", floor=1e-3)


class Rank:
    """The stages of one rank, on a copy of the subject's module."""

    def __init__(self, rank: int, found: Subject, captured: Capture, plan: Plan, layout: Layout) -> None:
        self.found, self.plan, self.layout = found, plan, layout
        self.mesh = Mesh(plan.num_devices, layout.num_pipelines, rank)
        self.module = _silent(copy.deepcopy(found.module))
        pipeline = build(captured, plan, self.module)
        used = dict(enumerate(pipeline.parameters))
        devices = {name: _devices(plan, used, name) for name, _ in self.module.named_parameters()}
        everything = dict(self.module.named_parameters())
        self.parameters = {n: p for n, p in everything.items() if self.mesh.device in devices[n]}
        holders = {
            n: [self.mesh.global_rank(d, p) for p in range(layout.num_pipelines) for d in found_on]
            for n, found_on in devices.items()
            if found_on
        }
        self.sync = GradientSync(self.parameters, holders, self.mesh)
        self.step = pipeline.step
        self.executor = Executor(
            compile_program(plan),
            self.mesh.device,
            stages=pipeline.stages,
            slots=pipeline.slots,
            transport=DistributedTransport(self.mesh, pairs_of(plan), device=torch.device("cpu")),
            source=pipeline.source if self.mesh.device == 0 else None,
            streams=RandomStreams(0, torch.device("cpu")),
        )

    def train(self, batch: Any, number: int) -> None:
        self.step.begin(batch, lambda samples: self.module.training_step(samples, number), number)
        weight = 1 / (self.plan.batch_size * self.layout.num_pipelines)
        self.executor.run(loss_weight=weight, step=number)
        weights = [part.num_samples / self.plan.batch_size for part, _ in self.step.outputs]
        outputs = [loss_of(output).detach() for _, output in self.step.outputs]
        self.loss = sum(w * loss.item() for w, loss in zip(weights, outputs, strict=True))
        self.step.end()
        self.sync.sync()

    def check_gradients(self, what: str) -> None:
        reference = copy.deepcopy(self.found.module)
        losses = [_whole(reference, part, self.plan, 1 / self.layout.num_pipelines) for part in self._parts()]
        if self.mesh.device == 0:
            expected = losses[self.mesh.pipeline]
            assert abs(self.loss - expected) <= 1e-12 * abs(expected), (what, self.loss, expected)
        self._compare(reference, what)
        if not self.found.whole_batch:
            undivided = _silent(copy.deepcopy(self.found.module))
            loss_of(undivided.training_step(self.found.batch, 0)).backward()
            self._compare(undivided, f"{what}, undivided")

    def _parts(self) -> Iterator[Any]:
        total = batch_size_of(self.found.batch)
        size = total // self.layout.num_pipelines
        for start in range(0, total, size):
            yield slice_batch(self.found.batch, start, start + size, total)

    def _compare(self, reference: nn.Module, what: str) -> None:
        scale = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
        for name, expected in reference.named_parameters():
            if name in self.parameters:
                ours = self.parameters[name].grad
                assert (ours is None) == (expected.grad is None), f"{what}: {name}"
                if ours is not None and expected.grad is not None:
                    _close(ours, expected.grad, 1e-12, f"{what}: gradient of {name}", floor=1e-3 * scale)


def _devices(plan: Plan, used: Mapping[int, tuple[str, ...]], name: str) -> list[int]:
    return sorted({device for stage, names in used.items() if name in names for device in plan.stages[stage].devices})


def _part(batch: Any, rank: int, layout: Layout) -> Any:
    total = batch_size_of(batch)
    size = total // layout.num_pipelines
    start = size * (rank // (layout.world_size // layout.num_pipelines))
    return slice_batch(batch, start, start + size, total)


def _whole(module: nn.Module, batch: Any, plan: Plan, weight: float) -> float:
    """The step's micro-batches through the whole module, one after another; the loss of the mini-batch."""
    _silent(module)
    total = batch_size_of(batch)
    loss = 0.0
    for start, stop in plan.intervals(plan.step_stage, total):
        part = loss_of(module.training_step(slice_batch(batch, start, stop, total), 0))  # type: ignore[operator]
        (part * (weight * (stop - start) / total)).backward()
        loss += part.item() * (stop - start) / total
    return loss


def _silent(module: nn.Module) -> nn.Module:
    vars(module).update(log=lambda *_, **__: None)
    return module


def _close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str, floor: float = 0.0) -> None:
    error = (ours - expected).abs().max().item() if ours.numel() else 0.0
    scale = max(expected.abs().max().item() if expected.numel() else 0.0, floor)
    assert error <= tolerance * scale, f"{what}: error {error:.3g}, size {scale:.3g}"
