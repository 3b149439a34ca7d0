"""Models and training steps that people write by hand: each has one habit that a pipeline can get wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.acceptance.models.base import B, Entry, classifier, ids, images, labels, numbers, regression


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


class Retrieval(nn.Module):
    """Two towers with in-batch negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = mlp(4, 16, 8), mlp(4, 16, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        users, items = (F.normalize(tower(batch[name]), dim=1) for name, tower in self.named_children())
        return F.cross_entropy(users @ items.T * self.scale.exp(), torch.arange(len(users)))


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
    """BYOL: the target is an average of the online network, which the step itself updates."""

    def __init__(self, in_step: bool = False) -> None:
        super().__init__()
        self.online, self.predictor = mlp(6, 16, 8), mlp(8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.in_step = in_step

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.in_step:
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        with torch.no_grad():
            wanted = self.target(batch[1])
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(batch[0])), wanted).mean()


class Queue(nn.Module):
    """MoCo: negatives from a queue in a buffer, which the step fills."""

    def __init__(self) -> None:
        super().__init__()
        self.query = mlp(6, 16, 8)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(numbers(8, samples=8), dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        q = F.normalize(self.query(batch[0]), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(batch[1]), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T], dim=1)
        return F.cross_entropy(logits, torch.zeros(len(q)).long())


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


class PenaltyInside(Penalty):
    """The same, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(6, 16, 6), mlp(7, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (
            super().training_step((self.first(batch[0]).detach(), batch[1]))
            + self.last(F.pad(self.first(batch[0]), (0, 1))).square().mean()
        )


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


class Graph(nn.Module):
    """A graph network: the edges are an index tensor, and count neither nodes nor samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            sent = layer(x)[edges[0]]
            x = torch.zeros(x.shape[0], sent.shape[1], dtype=x.dtype).index_add(0, edges[1], sent).tanh()
        return self.head(x)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["x"], batch["edges"]), batch["y"])


class DenseGraph(nn.Module):
    """A graph network with one dense graph per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, near = inputs
        for layer in (self.first, self.second):
            x = (near @ layer(x)).tanh()
        return self.head(x.mean(1))


class PointNet(nn.Module):
    """Point clouds: a shared perceptron and the maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.head = mlp(3, 16, 16), mlp(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.local(x).amax(1))


class Ode(nn.Module):
    """The same module, called many times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.flow, self.last = nn.Linear(6, 8), mlp(8, 16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = x + 0.1 * self.flow(x + 0.05 * self.flow(x))
        return self.last(x)


class Hyper(nn.Module):
    """A network makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.body = mlp(6, 8, 6 * 8), mlp(8, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.maker(x).view(-1, 6, 8)
        return self.body(torch.bmm(x[:, None], weights)[:, 0].tanh())


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


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)])
        self.middle = nn.Conv2d(16, 16, 3, 1, 1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 8, 2, 2), nn.ConvTranspose2d(16, 3, 2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
        x = self.middle(x).relu()
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], dim=1))
        return x


class Actor(nn.Module):
    """An actor and a critic with a clipped loss, on advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = mlp(6, 16, 16), mlp(16, 3), mlp(16, 1)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        h = self.body(batch["state"])
        chosen = self.actor(h).log_softmax(1).gather(1, batch["action"][:, None])[:, 0]
        ratio = (chosen - batch["before"]).exp()
        gain = torch.minimum(ratio * batch["gain"], ratio.clamp(0.8, 1.2) * batch["gain"]).mean()
        return F.mse_loss(self.critic(h)[:, 0], batch["gain"]) - gain


class Distilled(nn.Module):
    """A frozen teacher in eval mode, and a student."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp(6, 16, 8, 3)
        self.teacher = mlp(6, 32, 32, 3).requires_grad_(False).eval()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0]).softmax(1)
        return F.kl_div(self.student(batch[0]).log_softmax(1), wanted, reduction="batchmean")


class Adversarial(nn.Module):
    """Generator and discriminator in one step with one loss, by a reversed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(4, 16, 6), mlp(6, 16, 1)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = self.generator(batch[0])
        reversed_ = made + (made.detach() - made) * 2
        false, true = self.discriminator(reversed_), self.discriminator(batch[1])
        return F.softplus(false).mean() + F.softplus(-true).mean()


class MeanOfTokens(nn.Module):
    """A mean over the tokens that are not masked: samples do not count the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(32, 8), mlp(8, 16, 8), nn.Linear(8, 32)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.head(self.body(self.embed(batch["ids"])))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def _ragged() -> dict[str, Tensor]:
    wanted = ids(seed=3)
    for row in range(B):
        wanted[row, 2 + row :] = -100
    return {"ids": ids(), "labels": wanted}


def _graph() -> dict[str, Tensor]:
    edges = torch.randint(0, 12, (2, 30), generator=torch.Generator().manual_seed(0))
    return {"x": numbers(5, samples=12), "edges": edges, "y": torch.arange(12) % 3}


def _step(module: nn.Module, batch: Any) -> Entry:
    return lambda: (copy.deepcopy(module), batch)


_X = numbers(6)
_PAIR = (numbers(6), numbers(6, seed=1))
_XY = (_X, labels())


def _entries() -> dict[str, Entry]:
    return {
        "dlrm": lambda: (Ranking(), _clicks()),
        "dlrm_sparse": lambda: (Ranking(sparse=True), _clicks()),
        "two_towers": lambda: (Retrieval(), {"user": numbers(4), "item": numbers(4, seed=1)}),
        "simclr": lambda: (SimCLR(), _PAIR),
        "byol": lambda: (Momentum(), _PAIR),
        "byol_in_step": lambda: (Momentum(in_step=True), _PAIR),
        "moco": lambda: (Queue(), _PAIR),
        "experts": lambda: classifier(Experts(), _X),
        "expert_blocks": lambda: classifier(ExpertBlocks(), _X),
        "slices": lambda: classifier(Slices(), _X),
        "slices_in_step": lambda: (SlicesInStep(), _XY),
        "asks_parameters": lambda: classifier(AsksParameters(), _X),
        "device_between": lambda: (DeviceBetween(), _XY),
        "own_function": lambda: (OwnFunction(), _XY),
        "gradient_penalty": lambda: (Penalty(), _XY),
        "penalty_inside": lambda: (PenaltyInside(), _XY),
        "vae": lambda: (Variational(), {"x": _X, "noise": numbers(4, seed=1)}),
        "graph": lambda: (Graph(), _graph()),
        "dense_graph": lambda: classifier(DenseGraph(), (numbers(7, 5), numbers(7, 7, seed=1))),
        "point_net": lambda: classifier(PointNet(), numbers(9, 3)),
        "ode": lambda: classifier(Ode(), _X),
        "hyper_network": lambda: classifier(Hyper(), _X),
        "spectral": lambda: classifier(Spectral(), _X),
        "reparametrised": lambda: classifier(Reparametrised(), _X),
        "stateful": lambda: classifier(Stateful(), _X),
        "multitask": lambda: (Multitask(), _XY),
        "unet": lambda: regression(UNet(), images(), images()),
        "actor_critic": lambda: (
            Actor(),
            {"state": _X, "action": labels(), "before": -numbers().abs(), "gain": numbers(seed=2)},
        ),
        "distilled": lambda: (Distilled(), _XY),
        "adversarial": lambda: (Adversarial(), (numbers(4), _X)),
        "mean_of_tokens": lambda: (MeanOfTokens(), _ragged()),
    }


MODELS: dict[str, Entry] = _entries()
