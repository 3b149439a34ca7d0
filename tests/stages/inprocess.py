"""Run all stages of a plan in one process, one micro-batch at a time: a pipeline without communication."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_gpp.capture import Capture, batch_size_of, slice_batch
from lightning_gpp.plan import SOURCE, STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.runtime.stage import LOSS, MicroBatch, StageModule
from lightning_gpp.stages import Pipeline, build


def chain_of(captured: Capture, stages: list[list[str]], micro_batch_size: int = 2) -> Plan:
    """One device per stage, the step with the last stage."""
    modules = [*map(tuple, stages[:-1]), (*stages[-1], STEP)]
    drafts = [
        Stage(name=f"s{i}", modules=m, devices=(len(stages) - 1 - i,), micro_batch_size=micro_batch_size)
        for i, m in enumerate(modules)
    ]
    return make_plan(captured.graph, drafts, batch_size=captured.batch_size)


def split_gradients(
    module: nn.Module,
    captured: Capture | Pipeline,
    plan: Plan,
    batch: Any,
    step: str = "training_step",
    wrap: Callable[[Sequence[StageModule], Plan], Sequence[StageModule]] | None = None,
) -> float:
    """Loss of the split model; gradients go to the module's parameters. Values cross borders as detached leaves."""
    pipeline = captured if isinstance(captured, Pipeline) else build(captured, plan, module)
    if wrap is not None:
        pipeline = replace(pipeline, stages=tuple(wrap(pipeline.stages, plan)))
    total = batch_size_of(batch)
    pipeline.step.begin(batch, lambda samples: getattr(module, step)(samples, 0), seed=1)
    loss = 0.0
    for index, (start, stop) in enumerate(plan.intervals(plan.step_stage, total)):
        loss += _one(pipeline, plan, MicroBatch(index, start, stop, total))
    pipeline.step.end()
    return loss


def _one(pipeline: Any, plan: Plan, micro_batch: MicroBatch) -> float:
    given = pipeline.source.inputs(micro_batch)
    leaves: dict[tuple[int, str], torch.Tensor] = {}
    outputs: list[dict[str, torch.Tensor]] = []
    for number, stage in enumerate(pipeline.stages):
        values = {}
        for edge, slots in zip(plan.edges, pipeline.slots, strict=True):
            for slot in slots if edge.dst == number else ():
                source = given if edge.src == SOURCE else outputs[edge.src]
                tensor = source[slot.name].detach()
                assert tuple(tensor.shape) == slot.spec.sizes(micro_batch.num_samples), slot
                assert str(tensor.dtype) == f"torch.{slot.spec.dtype}", slot
                differentiable = slot.spec.requires_grad and edge.src != SOURCE
                values[slot.name] = leaves[number, slot.name] = tensor.requires_grad_(differentiable)
        outputs.append(stage.forward(values, micro_batch))
    weight = micro_batch.num_samples / micro_batch.total
    for number in reversed(range(len(outputs))):
        _backward(pipeline, plan, number, outputs, leaves, weight)
    return outputs[plan.step_stage][LOSS].item() * weight


def _backward(pipeline: Any, plan: Plan, number: int, outputs: Any, leaves: Any, weight: float) -> None:
    tensors, gradients = [], []
    for edge, slots in zip(plan.edges, pipeline.slots, strict=True):
        for slot in slots if edge.src == number else ():
            if outputs[number][slot.name].requires_grad:
                leaf = leaves[edge.dst, slot.name]
                tensors.append(outputs[number][slot.name])
                gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    if LOSS in outputs[number]:
        tensors.append(outputs[number][LOSS])
        gradients.append(torch.full_like(outputs[number][LOSS], weight))
    if tensors:
        torch.autograd.backward(tensors, gradients)


def whole_gradients(module: nn.Module, plan: Plan, batch: Any, step: str = "training_step") -> tuple[float, nn.Module]:
    """The same micro-batches through an untouched copy of the module."""
    reference = copy.deepcopy(module)
    total = batch_size_of(batch)
    loss = 0.0
    for start, stop in plan.intervals(plan.step_stage, total):
        part = getattr(reference, step)(slice_batch(batch, start, stop, total), 0)
        part = part["loss"] if isinstance(part, dict) else part
        (part * ((stop - start) / total)).backward()
        loss += part.item() * (stop - start) / total
    return loss, reference


def assert_transparent(module: nn.Module, captured: Capture, plan: Plan, batch: Any) -> None:
    """Loss, every gradient and every buffer equal the unsplit model's (float64, 1e-12 relative)."""
    for owner in module.modules():
        if hasattr(owner, "log_dict"):
            vars(owner)["log"] = lambda *_, **__: None
    loss, reference = whole_gradients(module, plan, batch)
    split = split_gradients(module, captured, plan, batch)
    assert abs(split - loss) <= 1e-12 * abs(loss), (split, loss)
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any(), name
        else:
            scale = max(theirs.grad.abs().max().item(), 1e-30)
            assert ours.grad is not None, name
            assert (ours.grad - theirs.grad).abs().max().item() <= 1e-12 * max(scale, 1e-3), name
    for (name, ours), theirs in zip(module.named_buffers(), reference.buffers(), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), rtol=1e-12, atol=0), name
