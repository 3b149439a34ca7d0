"""What the capture says that autograd keeps, against what autograd keeps of real runs, for several batch sizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.graph import Affine


class Attention(nn.Module):
    """Queries, keys and values are parts of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class InPlace(nn.Module):
    """A linear layer keeps the memory that the activation in front of it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x), inplace=True))


class Tied(nn.Module):
    """The weight is read as it is and as views; no view is an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.embedding(tokens).tanh() @ self.embedding.weight.t()) @ self.embedding.weight[:, :3]


class Model(L.LightningModule):
    """A network and a loss of its result and of the labels."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        result = self.network(batch[0])
        return result.sum() if self.loss is None else self.loss(result, batch[1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Dropout(0.5), nn.Linear(9, 4), nn.Sigmoid())


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda num_samples: torch.rand(num_samples, *shape)


def classes(num_classes: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda num_samples: torch.randint(num_classes, (num_samples, *shape))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "attention": (Attention, numbers(10, 16)),
    "mlp": (mlp, numbers(5)),
    "convolutions": (convolutions, numbers(3, 8, 8)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(24, 2)), classes(11, 4)),
    "in place": (InPlace, numbers(5)),
    "tied": (Tied, classes(11, 4)),
}


LOSSES: dict[str, tuple[Callable[[], L.LightningModule], Callable[[int], Tensor], Callable[[int], Tensor]]] = {
    "cross entropy": (lambda: Model(nn.Linear(5, 7), F.cross_entropy), numbers(5), classes(7)),
    "squares": (lambda: Model(nn.Linear(5, 7), F.mse_loss), numbers(5), numbers(7)),
    "of a kept result": (lambda: Model(nn.Sequential(nn.Linear(5, 7), nn.Tanh()), F.mse_loss), numbers(5), numbers(7)),
}


class Kept:
    """What autograd keeps instead of a tensor; gone when the graph is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # a kept result that knows its graph would keep the graph


def really_kept(model: L.LightningModule, batch: Any) -> int:
    """Bytes of all memories that autograd keeps when the step has returned, without those of parameters and buffers."""
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Kept:
        alive.add(kept := Kept(tensor))
        return kept

    vars(model)["log"] = lambda *_, **__: None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        loss = model.training_step(batch, 0)
    storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage().nbytes() for kept in alive}
    assert loss.requires_grad  # its graph is alive until here
    states = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    return sum(size for pointer, size in storages.items() if pointer not in states)


def said_kept(captured: Capture, num_samples: int) -> float:
    return sum(operator.saved_bytes.at(num_samples) for operator in captured.graph)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    network, inputs = NETWORKS[name]
    model = Model(network())
    captured = capture_step(model, (inputs(4), torch.zeros(4)))
    assert captured.graph["step"].saved_bytes == Affine()
    for num_samples in (1, 2, 5, 16):
        expected = really_kept(model, (inputs(num_samples), torch.zeros(num_samples)))
        assert expected > 0
        assert said_kept(captured, num_samples) == expected, num_samples


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    create, inputs, labels = LOSSES[name]
    model = create()
    captured = capture_step(model, (inputs(4), labels(4)))
    assert captured.graph["step"].saved_bytes.at(8) > 0
    for num_samples in (1, 2, 5, 16):
        expected = really_kept(model, (inputs(num_samples), labels(num_samples)))
        assert said_kept(captured, num_samples) == expected, num_samples


def test_parts_of_one_projection_count_as_the_projection() -> None:
    """Once, by the operator that keeps the first part."""
    graph = capture_step(Model(Attention()), (numbers(10, 16)(4), torch.zeros(4))).graph
    kept = {operator.target: operator.saved_bytes for operator in graph}
    projection, mixed, logsumexp = (Affine(4 * 10 * size) for size in (48, 16, 2))
    assert kept["scaled_dot_product_attention"] == projection + mixed + logsumexp


def test_evaluation_keeps_nothing() -> None:
    model = Model(nn.Linear(5, 7), F.cross_entropy)
    model.validation_step = model.training_step  # type: ignore[method-assign]
    captured = capture_step(model, (numbers(5)(4), classes(7)(4)), step="validation_step")
    assert said_kept(captured, 8) == 0
