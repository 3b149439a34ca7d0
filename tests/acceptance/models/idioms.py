"""Models and training steps that people write by hand: each has one habit that a pipeline can get wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.acceptance.models.base import Entry, classifier, ids, labels, numbers


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Ranking(nn.Module):
    """A deep recommender (DLRM): embeddings of categories, bags with offsets, products of all pairs."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.bottom, self.top = mlp(4, 16, 8), mlp(8 + 6, 16, 1)
        self.tables = nn.ModuleList([nn.EmbeddingBag(32, 8, mode="sum", sparse=sparse) for _ in range(3)])

    def forward(self, dense: Tensor, *categories: Tensor) -> Tensor:
        features = [self.bottom(dense), *(table(x) for table, x in zip(self.tables, categories, strict=True))]
        stacked = torch.stack(features, dim=1)
        rows, columns = torch.triu_indices(4, 4, 1)
        pairs = (stacked @ stacked.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([features[0], pairs], dim=1))[:, 0]

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        scores = self(batch["dense"], batch["user"], batch["item"], batch["shop"])
        return F.binary_cross_entropy_with_logits(scores, batch["click"])


def _clicks() -> dict[str, Tensor]:
    bags = {name: ids(3, seed=number) for number, name in enumerate(("user", "item", "shop"))}
    return {"dense": numbers(4), **bags, "click": (labels() > 0).double()}


class SimCLR(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector = mlp(6, 16, 16), mlp(16, 8)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        views = torch.cat(batch)
        z = F.normalize(self.projector(self.encoder(views)), dim=1)
        similar = z @ z.T - 1e9 * torch.eye(len(z), dtype=z.dtype)
        return F.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))


class Momentum(nn.Module):
    """BYOL: a target beside the online network."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = mlp(6, 16, 8), mlp(8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = self.target(batch[1])
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(batch[0])), wanted).mean()


class Experts(nn.Module):
    """A mixture of experts that gathers the tokens of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Linear(6, 8), nn.Linear(8, 3)
        self.experts, self.head = nn.ModuleList([mlp(8, 16, 8) for _ in range(3)]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        weights, choice = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(choice == number)[0]
            mixed[rows] = expert(x[rows]) * weights[rows, None]
        return self.head(x + mixed)


class ExpertBlocks(nn.Module):
    """The same mixture as a block among others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = mlp(6, 16, 6), Experts(), mlp(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x)))


class Slices(nn.Module):
    """Results of modules are written into parts of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), mlp(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 16)
        h[:, :8] = self.a(x)
        h[:, 8:] = self.b(x).relu()
        return self.c(h)


class SlicesInStep(Slices):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = torch.zeros(x.shape[0], 16, dtype=x.dtype)
        h[:, :8] = self.a(x)
        h[:, 8:] = self.b(x).relu()
        return F.cross_entropy(self.c(h), y)


class AsksParameters(nn.Module):
    """Device and dtype of the model's first parameter, and a tensor made with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(6, 16, 8), mlp(9, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        like = next(self.parameters())
        ones = torch.ones(x.shape[0], 1, device=like.device, dtype=like.dtype)
        h = self.a(x.to(like.device))
        return self.b(torch.cat([h, ones.to(h.device)], dim=1))


class DeviceBetween(AsksParameters):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = self.a(x)
        ones = torch.ones(len(x), 1, device=h.device, dtype=h.dtype)
        return F.cross_entropy(self.b(torch.cat([h, ones], dim=1)), y)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OwnFunction(AsksParameters):
    """A custom function between module calls of the step."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = Clipped.apply(self.a(x) * 3)
        return F.cross_entropy(self.b(F.pad(h, (0, 1))), y)


class Penalty(nn.Module):
    """A gradient penalty: the step differentiates the network with respect to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 16, 16, 1)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


class Variational(nn.Module):
    """A VAE; the step draws its noise from the batch, so that runs can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(6, 16, 8), mlp(4, 16, 6)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        mean, log_variance = self.encoder(batch["x"]).chunk(2, dim=1)
        z = mean + (0.5 * log_variance).exp() * batch["noise"]
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return F.mse_loss(self.decoder(z), batch["x"]) + 0.1 * divergence


class Spectral(nn.Module):
    """A layer of a neural operator: complex parameters between a Fourier transform and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 3)
        self.weights = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.before(x), dim=1)
        return self.after(torch.fft.irfft(modes @ self.weights, n=8, dim=1).tanh())


class Reparametrised(nn.Module):
    """Spectral norm (with its state), weight norm, and a parametrisation of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.c = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.d = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).tanh()).tanh()))


class Stateful(nn.Module):
    """A layer that keeps a running mean in a buffer, and counts in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(6, 16, 8), mlp(8, 8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.calls += 1
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.b(h)


class Multitask(nn.Module):
    """Losses whose weights are learned, on heads that share a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(6, 16, 16)
        self.heads = nn.ModuleDict({"class-1": mlp(16, 8, 3), "out put": mlp(16, 8, 1), "0": mlp(16, 6)})
        self.weights = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = self.trunk(x)
        losses = torch.stack(
            [
                F.cross_entropy(self.heads["class-1"](h), y),
                self.heads["out put"](h).square().mean(),
                F.mse_loss(self.heads["0"](h), x),
            ]
        )
        return (losses * (-self.weights).exp() + self.weights).sum()


_X = numbers(6)
_PAIR = (numbers(6), numbers(6, seed=1))
_XY = (_X, labels())


def _entries() -> dict[str, Entry]:
    return {
        "dlrm": lambda: (Ranking(), _clicks()),
        "dlrm_sparse": lambda: (Ranking(sparse=True), _clicks()),
        "simclr": lambda: (SimCLR(), _PAIR),
        "byol": lambda: (Momentum(), _PAIR),
        "experts": lambda: classifier(Experts(), _X),
        "expert_blocks": lambda: classifier(ExpertBlocks(), _X),
        "slices": lambda: classifier(Slices(), _X),
        "slices_in_step": lambda: (SlicesInStep(), _XY),
        "asks_parameters": lambda: classifier(AsksParameters(), _X),
        "device_between": lambda: (DeviceBetween(), _XY),
        "own_function": lambda: (OwnFunction(), _XY),
        "gradient_penalty": lambda: (Penalty(), _XY),
        "vae": lambda: (Variational(), {"x": _X, "noise": numbers(4, seed=1)}),
        "spectral": lambda: classifier(Spectral(), _X),
        "reparametrised": lambda: classifier(Reparametrised(), _X),
        "stateful": lambda: classifier(Stateful(), _X),
        "multitask": lambda: (Multitask(), _XY),
    }


MODELS: dict[str, Entry] = _entries()
