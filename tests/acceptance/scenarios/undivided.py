"""Steps of samples that depend on each other, and forwards that decide, fill, differentiate or remember."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.acceptance.scenarios.base import Chain, Facts, Make, build, facts_of, family, loader, staged, validated
from tests.capture.test_uncut import Experts


class Graph(Chain):
    """A graph network: the samples of a mini-batch point at each other, so none can be left out."""

    def loss(self, batch: Any) -> Tensor:
        sent = self.first(batch["x"])[batch["edges"][0]]
        gathered = torch.zeros(len(batch["x"]), 6, dtype=sent.dtype).index_add(0, batch["edges"][1], sent)
        return F.mse_loss(self.last(gathered.tanh()), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, batch_size=8)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), batch_size=8)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class Clouds(Graph):
    """Calls a module once per sample, on point clouds of different sizes."""

    def loss(self, batch: Any) -> Tensor:
        points = [self.first(cloud).amax(0) for cloud in batch["clouds"]]
        return F.mse_loss(self.last(torch.stack(points)), batch["y"])


class EvaluatesClouds(Clouds):
    """Trains on single samples, and evaluates those that depend on each other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch["x"]), batch["y"])


class EvaluatesGraph(EvaluatesClouds):
    loss = Graph.loss


def batches(kind: type[Chain], number: int = 3) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = []
    for n in range(number):
        edges = torch.randint(0, 8, (2, 20), generator=generator)
        clouds = [normal(3 + (n + cloud) % 4, 4) for cloud in range(8)]
        given = {"clouds": clouds} if issubclass(kind, Clouds) and kind.loss is Clouds.loss else {"edges": edges}
        made.append({"x": normal(8, 4), "y": normal(8, 2), **given})
        if kind is Clouds:
            del made[-1]["x"]
    return made


def _evaluated(make: Make, folder: Path, kind: type[Chain], **gpp: Any) -> Facts:
    """Trained, validated, tested and predicted with."""
    module, trainer, data = build(kind), make(gpp={**staged(kind), **gpp}), DataLoader(batches(kind), batch_size=None)
    trainer.fit(module, data, data)
    facts = facts_of(trainer, module)
    return {**facts, "zero predicted": trainer.predict(module, data)}


family(
    "undivided",
    _evaluated,
    {kind.__name__: {"kind": kind} for kind in (Graph, Clouds, EvaluatesClouds, EvaluatesGraph)},
)
family("refused", _evaluated, {"clouds": {"kind": Clouds, "step": "micro_batches"}})


class SkipsSteps(Chain):
    """Skips every second mini-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if batch_idx % 2 else None


class Averages(Chain):
    """A teacher whose weights are a mean of the student's, which the step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
        return self.loss(batch) + F.mse_loss(self.first(batch[0]), self.teacher(batch[0]))


class KeptByHook(Chain):
    """A loss of what a hook keeps of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.first[0].register_forward_hook(lambda module, args, result: self.kept.append(result))

    def loss(self, batch: Any) -> Tensor:
        self.kept.clear()
        return super().loss(batch) + sum(each.square().mean() for each in self.kept)


class Remembering(nn.Module):
    """Adds what it has seen, if it is told to, and what is in a buffer, in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.uses, self.seen = nn.Linear(6, 6), False, None
        self.register_buffer("cache", torch.zeros(16, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.uses:
            x = x if self.seen is None else x + self.seen
            self.seen = x.detach()
            self.cache[: len(x)] += x.detach()
            x = x + self.cache[: len(x)]
        return x


class Remembers(Chain):
    """A module keeps something for later calls of a validation step."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(Remembering(), nn.Linear(6, 2))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        memory = self.last[0]
        memory.uses, memory.seen = True, None
        memory.cache.zero_()
        hidden = self.first(batch[0])
        for _ in range(3):
            out = self.last(hidden)
        memory.uses, memory.seen = False, None
        self.log("val_loss", out.square().mean())


class RemembersInTraining(Remembers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last[0].uses, self.last[0].seen = True, None
        return self.loss(batch)


class Dropped(nn.Module):
    """Skips layers at random; the draws of a test have to repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < 2.0:
                x = layer(x).tanh()
        return x


class Mixed(Chain):
    """A mixture of experts on the other rank than the step, and dropped layers: both decide by values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(4, 8), Experts()), nn.Sequential(Dropped(), nn.Linear(8, 2))


class Forces(nn.Module):
    """Returns an energy and its slope, in two layers between which a plan could cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.outer(self.inner(x).tanh())
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class Physics(Chain):
    """Trains the slope, too."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Forces()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        energy, slope = self.last(self.first(batch[0]).tanh())
        return F.mse_loss(energy, batch[1][:, :1]) + slope.square().mean()

    validation_step = None  # type: ignore[assignment]  # needs gradients


def _trained(make: Make, folder: Path, kind: type[Chain], **gpp: Any) -> Facts:
    return validated(make, build(kind), gpp={**staged(kind), **gpp})


PLANNED = {"stages": None, "max_replicas": 1}
STAGES = {"stages": {"first": 1, "teacher": 0, "last": 0}}
family(
    "undivided",
    _trained,
    {
        "skips": {"kind": SkipsSteps},
        "averages": {"kind": Averages, **PLANNED},
        "remembers": {"kind": Remembers},
        "mixed": {"kind": Mixed},
        "physics": {"kind": Physics, **PLANNED},
    },
)
family(
    "refused",
    _trained,
    {
        "averages": {"kind": Averages, **STAGES},
        "kept_by_hook": {"kind": KeptByHook},
        "remembers": {"kind": RemembersInTraining},
    },
)


class Fills(nn.Module):
    """Writes into one of the containers that it gets."""

    def __init__(self, layers: nn.Module, where: str) -> None:
        super().__init__()
        self.layers, self.where = layers, where

    def forward(self, batch: Any, found: list[Tensor], *, options: dict[str, Any]) -> None:
        if self.where == "object":
            batch.hidden = self.layers(batch.x)
        elif self.where == "batch":
            batch["hidden"] = self.layers(batch["x"])
        elif self.where == "list":
            found.append(self.layers(batch["x"]))
        else:
            options["inner"]["hidden"] = self.layers(batch["x"])


@dataclass
class Pair:
    """An object with attributes instead of a dictionary."""

    x: Tensor
    y: Tensor
    hidden: Any = None


class Filled(Chain):
    """A batch, a list and options go to a module, which leaves its result there."""

    def __init__(self, where: str = "batch") -> None:
        super().__init__()
        self.first, self.where = Fills(self.first, where), where

    def loss(self, batch: Any) -> Tensor:
        found, options = list[Tensor](), {"inner": dict[str, Any]()}
        self.first(batch, found, options=options)
        given = vars(batch) if isinstance(batch, Pair) else batch
        (hidden,) = (*found, *(each["hidden"] for each in (given, options["inner"]) if each.get("hidden") is not None))
        return F.mse_loss(self.last(hidden), given["y"])


def _filled(make: Make, folder: Path, where: str) -> Facts:
    def collated(samples: Any) -> Any:
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return Pair(x, y) if where == "object" else {"x": x, "y": y}

    module, trainer, data = build(Filled, where=where), make(), loader(16, collate_fn=collated)
    trainer.fit(module, data, data)
    return facts_of(trainer, module)


family("filled", _filled, {where: {"where": where} for where in ("batch", "list", "options", "object")})
