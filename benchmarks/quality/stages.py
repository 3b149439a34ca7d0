"""The parts of a model as the stages of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.quality.tasks import Samples, Task
from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.plan import SOURCE, STEP, Edge, Plan, Stage
from lightning_gpp.runtime import LOSS, MicroBatch, Slot


def plan_of(task: Task, num_stages: int, *, chain: bool) -> Plan:
    """1F1B with one micro-batch per mini-batch, each stage on its own device.

    Args:
        task: whose parts are divided.
        num_stages: one of the task's layouts.
        chain: run stages that do not depend on each other one after the other.
    """
    groups = task.layouts[num_stages]
    stages = tuple(
        Stage(
            name=group[0],
            modules=(STEP,) if index == num_stages - 1 else tuple(group),
            devices=(num_stages - 1 - index,),
            micro_batch_size=task.batch_size,
        )
        for index, group in enumerate(groups)
    )
    pairs = sorted({(src, dst) for _, src, dst in borders(task, groups)})
    edges = tuple(Edge(src=src, dst=dst, bytes=Affine(4, 0), differentiable=src != SOURCE) for src, dst in pairs)
    plan = Plan(stages=stages, edges=edges, batch_size=task.batch_size, schedule="1f1b")
    return plan.chained() if chain else plan


def borders(task: Task, groups: Sequence[Sequence[str]]) -> list[tuple[str, int, int]]:
    """What crosses a border: its name, the stage that makes it, and the one that reads it."""
    place = {part: index for index, group in enumerate(groups) for part in group}
    crossing = {
        (name, place.get(name, SOURCE), place[part]) for part, (_, reads) in task.parts.items() for name in reads
    }
    return sorted(entry for entry in crossing if entry[1] != entry[2])


def slots_of(task: Task, plan: Plan, samples: Samples) -> tuple[tuple[Slot, ...], ...]:
    """For every edge of the plan the tensors that it carries."""
    crossing = borders(task, task.layouts[len(plan.stages)])

    def slot(name: str) -> Slot:
        made = name in task.parts
        shape = task.shapes[name] if made else tuple(samples.inputs[name].shape[1:])
        dtype = "float32" if made else str(samples.inputs[name].dtype).removeprefix("torch.")
        dims = (Affine(1, 0), *(Affine(0, size) for size in shape))
        return Slot(name, TensorSpec(shape=dims, dtype=dtype, requires_grad=made))

    return tuple(tuple(slot(name) for name, *ends in crossing if ends == [edge.src, edge.dst]) for edge in plan.edges)


@dataclass(slots=True)
class Stream:
    """The mini-batches that are on their way, by lane."""

    open: dict[int, Samples] = field(default_factory=dict)

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return dict(self.open[micro_batch.lane].inputs)

    def targets(self, micro_batch: MicroBatch) -> Tensor:
        return self.open[micro_batch.lane].targets


class PartsStage:
    """Computes some parts of a task one after the other; with the last part also the loss, which it keeps."""

    uses_random = False

    def __init__(self, task: Task, names: Sequence[str], modules: Mapping[str, nn.Module], stream: Stream) -> None:
        self.task, self.names, self.stream = task, names, stream
        self.modules = {name: modules[name] for name in names}
        self.loss = torch.zeros(())

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return tuple(self.modules.values())

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        made = computed(self.task, self.modules, values)
        output = made.get(list(self.task.parts)[-1])
        if output is None:
            return made
        loss = self.task.loss(output, self.stream.targets(micro_batch))
        self.loss = loss.detach()
        return {LOSS: loss}


def computed(task: Task, modules: Mapping[str, nn.Module], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of some parts of a task."""
    made: dict[str, Tensor] = {}
    for name, module in modules.items():
        made[name] = module(*(made[read] if read in made else values[read] for read in task.parts[name][1]))
    return made
