"""Hand-made eager stages for any plan, and what one process computes with them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.runtime import LOSS, MicroBatch, Slot

WIDTH = 3
VOCABULARY = 5
SAMPLES = Affine(1, 0)


def spec(*shape: Affine | int, dtype: str = "float64", requires_grad: bool = False) -> TensorSpec:
    dims = tuple(dim if isinstance(dim, Affine) else Affine(0, dim) for dim in shape)
    return TensorSpec(shape=dims, dtype=dtype, requires_grad=requires_grad)


def slots_of(edge: Edge) -> tuple[Slot, ...]:
    """Every kind of tensor: batch first, batch last (not contiguous), without batch, empty, integer, bool."""
    if edge.artificial:
        return ()
    if edge.src == SOURCE:
        return Slot("x", spec(SAMPLES, WIDTH)), Slot("index", spec(SAMPLES, dtype="int64"))
    name, grad = f"stage{edge.src}", edge.differentiable
    return (
        Slot(f"{name}.rows", spec(SAMPLES, WIDTH, requires_grad=grad)),
        Slot(f"{name}.columns", spec(WIDTH, SAMPLES, requires_grad=grad)),
        Slot(f"{name}.fixed", spec(WIDTH, requires_grad=grad)),
        Slot(f"{name}.empty", spec(SAMPLES, 0, requires_grad=grad)),
        Slot(f"{name}.index", spec(SAMPLES, dtype="int64")),
        Slot(f"{name}.mask", spec(SAMPLES, dtype="bool")),
        Slot(f"{name}.unused", spec(SAMPLES, 2, requires_grad=grad)),
    )


def all_slots(plan: Plan) -> tuple[tuple[Slot, ...], ...]:
    return tuple(map(slots_of, plan.edges))


class Probe(torch.autograd.Function):
    """Identity that keeps an object alive exactly as long as autograd keeps the activations of this forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: object) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Token:
    pass


class Mixer(nn.Module):
    """A stage: mixes whatever comes in, and returns every kind of tensor. The step's stage adds a loss."""

    uses_random = False

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return (self,)

    def __init__(self, plan: Plan, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.index = index
        self.has_loss = index == plan.step_stage
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=torch.float64))
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64))
        self.losses: dict[int, tuple[float, int]] = {}
        self.tokens: weakref.WeakSet[Token] = weakref.WeakSet()
        self.peak_alive = 0

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        hidden = self._probe(self.table[self._index(values, micro_batch)])
        for name, value in values.items():
            hidden = hidden + self._term(name.rpartition(".")[2], value)
        hidden = torch.tanh(hidden @ self.mixing())
        outputs = {
            "rows": hidden,
            "columns": (hidden * 2).t(),
            "fixed": self.fixed * 2,
            "empty": hidden[:, :0],
            "index": self._index(values, micro_batch) + 1,
            "mask": hidden.detach()[:, 0] > 0,
            "unused": hidden[:, :2] * 3,
        }
        result = {f"stage{self.index}.{name}": value for name, value in outputs.items()}
        if self.has_loss:
            loss = result[LOSS] = (hidden + self.fixed).square().mean()
            self.losses[micro_batch.start] = (loss.item(), micro_batch.num_samples)
        return result

    def mixing(self) -> Tensor:
        """The weight that rows are multiplied with."""
        return self.weight

    def _index(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> Tensor:
        indices = [value for name, value in values.items() if name.endswith("index")]
        return sum(indices, torch.zeros(micro_batch.num_samples, dtype=torch.int64)) % VOCABULARY

    def _term(self, kind: str, value: Tensor) -> Tensor | float:
        if kind == "columns":
            return value.t().square()
        if kind == "mask":
            return value.double()[:, None]
        return value if kind in ("x", "rows", "fixed") else 0.0

    def _probe(self, hidden: Tensor) -> Tensor:
        token = Token()
        self.tokens.add(token)
        if torch.is_grad_enabled():
            hidden = Probe.apply(hidden, token)
        self.peak_alive = max(self.peak_alive, len(self.tokens))
        return hidden


@dataclass
class Data:
    """The mini-batch of one pipeline replica."""

    x: Tensor
    index: Tensor
    calls: list[int] = field(default_factory=list)

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        self.calls.append(micro_batch.index)
        part = slice(micro_batch.start, micro_batch.stop)
        return {"x": self.x[part], "index": self.index[part]}


def make_data(num_samples: int, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
    return Data(x, torch.randint(VOCABULARY, (num_samples,), generator=generator))


def make_stages(plan: Plan, tied: bool = False) -> list[Mixer]:
    """All stages of a plan, the same in every process. `tied`: the first and the last stage share their weight. Slices
    of a stage share all parameters."""
    stages = [Mixer(plan, index) for index in range(len(plan.stages))]
    first: dict[tuple[str, ...], Mixer] = {}
    for entry, stage in zip(plan.stages, stages, strict=True):
        if entry.tokens is not None:
            of = first.setdefault(entry.modules, stage)
            stage.weight, stage.fixed, stage.table = of.weight, of.fixed, of.table
    if tied:
        stages[-1].weight = stages[0].weight
    return stages


def named_parameters(stages: list[Mixer]) -> dict[int, dict[str, nn.Parameter]]:
    """For every stage its parameters under canonical names; a tied one has one name."""
    names: dict[nn.Parameter, str] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            names.setdefault(parameter, f"stage{index}.{name}")
    return {index: {names[p]: p for p in stage.parameters()} for index, stage in enumerate(stages)}


def holders_of(plan: Plan, stages: list[Mixer], num_pipelines: int) -> dict[str, tuple[int, ...]]:
    holders: dict[str, set[int]] = {}
    for index, named in named_parameters(stages).items():
        for name in named:
            for pipeline in range(num_pipelines):
                ranks = {pipeline * plan.num_devices + device for device in plan.stages[index].devices}
                holders.setdefault(name, set()).update(ranks)
    return {name: tuple(sorted(ranks)) for name, ranks in holders.items()}


def local_parameters(plan: Plan, stages: list[Mixer], device: int) -> dict[str, nn.Parameter]:
    named = named_parameters(stages)
    return {name: p for index in plan.stages_on(device) for name, p in named[index].items()}


def reference(plan: Plan, data: Data, tied: bool = False) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients of the undivided mini-batch, in one process, in the order of the stages."""
    stages = make_stages(plan, tied)
    total = len(data.x)
    micro_batch = MicroBatch(0, 0, total, total)
    made: dict[int, dict[str, Tensor]] = {SOURCE: data.inputs(micro_batch)}
    for index, stage in enumerate(stages):
        values: dict[str, Tensor] = {}
        for edge in plan.edges:
            if edge.dst == index:
                for slot in slots_of(edge):
                    value = made[edge.src][slot.name]
                    values[slot.name] = value if edge.differentiable else value.detach()
        made[index] = stage(values, micro_batch)
    loss = made[len(stages) - 1][LOSS]
    loss.backward()
    named = {name: p for group in named_parameters(stages).values() for name, p in group.items()}
    return loss.item(), {name: p.grad for name, p in named.items()}
