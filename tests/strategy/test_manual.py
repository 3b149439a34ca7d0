"""Manual optimization: the step runs once, on all ranks, and every network call is pipelined."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.strategy.harness import loader, run, strategy, trainer


def tower(*sizes: int) -> nn.Sequential:
    pairs = zip(sizes, sizes[1:], strict=False)
    return nn.Sequential(*(part for pair in pairs for part in (nn.Linear(*pair), nn.Tanh())))


class Adversaries(pl.LightningModule):
    """A generator and a critic with an optimizer and a scheduler each, and clipping of the generator's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = tower(3, 8, 8, 4)
        self.critic = tower(4, 6, 6, 1)
        self.seen: list[dict[str, Any]] = []

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        optimizers = self.optimizers()
        noise = torch.randn(len(real), 3, dtype=real.dtype)
        losses = [self._fool(optimizers[0], noise), self._tell(optimizers[1], real, noise)]
        self.log_dict({"fool": losses[0], "tell": losses[1]}, on_step=True, on_epoch=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def _fool(self, optimizer: Any, noise: torch.Tensor) -> torch.Tensor:
        self.toggle_optimizer(optimizer)
        loss = nn.functional.softplus(-self.critic(self(noise))).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.note("generator", loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return loss

    def _tell(self, optimizer: Any, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        self.toggle_optimizer(optimizer)
        on_real = nn.functional.softplus(-self.critic(real)).mean()
        fake = self(noise).detach()
        loss = on_real + nn.functional.softplus(self.critic(fake)).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.note("critic", loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return loss

    def note(self, what: str, loss: torch.Tensor) -> None:
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in self.named_parameters()
            if not parameter.is_meta and parameter.grad is not None
        }
        self.seen.append({"what": what, "loss": loss.item(), "gradients": gradients})

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=0.02),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in optimizers]


class Accumulating(Adversaries):
    """Accumulates the gradients of two mini-batches, and steps once."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first, second = self.optimizers()
        noise = torch.randn(len(batch[0]), 3, dtype=batch[0].dtype)
        loss = nn.functional.softplus(-self.critic(self(noise))).mean() + self.critic(batch[0]).square().mean()
        self.manual_backward(loss / 2)
        self.note("both", loss)
        if batch_idx % 2 == 1:
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return loss


class Steady(Adversaries):
    """Draws no random numbers, and takes means over samples, like every pipeline on its own mini-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.critic(self(batch[1])).square().mean())
        self.manual_backward(self.critic(batch[0]).sin().mean())
        self.note("both", torch.zeros(()))
        for optimizer in optimizers:
            optimizer.step()


class Retaining(Adversaries):
    """Runs several backwards through one network call, and asks for a gradient without those of parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        first, second = self.optimizers()
        fake = self(torch.randn(len(batch[0]), 3, dtype=batch[0].dtype))
        scores = self.critic(fake)
        (slope,) = torch.autograd.grad(scores.sum(), fake, retain_graph=True)
        self.log("slope", slope.norm())
        for each in (first, second):
            each.zero_grad()
        self.manual_backward(scores.mean(), retain_graph=True)
        self.note("first", scores.mean())
        self.manual_backward(scores.square().mean() + slope.square().mean())
        self.note("second", scores.mean())
        first.step()
        second.step(closure=lambda: None)
        return {"loss": scores.mean().detach(), "fake": fake.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert len(outputs["fake"]) == len(batch[0])


KINDS = {kind.__name__: kind for kind in (Adversaries, Accumulating, Steady, Retaining)}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    return KINDS[kind]().double()


def fitted(kind: str, strategy: Any, devices: int, samples: int = 22, size: int = 8, **settings: Any) -> dict[str, Any]:
    module, machine = made(kind), trainer(strategy, devices, **settings)
    torch.manual_seed(3 if machine.global_rank == 0 else 77)
    machine.fit(module, loader(samples, size))
    metrics = {name: float(value) for name, value in machine.callback_metrics.items()}
    whole = {name: value.clone() for name, value in module.state_dict().items() if not value.is_meta}
    return {"seen": module.seen, "metrics": metrics, "steps": machine.global_step, "state": whole}


def pipelined(rank: int, devices: int, kind: str, options: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return fitted(kind, strategy(**options), devices, **settings)


Case = tuple[str, dict[str, Any], dict[str, Any]]
"""A kind of module, options of the strategy, and of the trainer."""


def all_pipelined(rank: int, devices: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [pipelined(rank, devices, *case) for case in cases]


def compare(devices: int, cases: list[Case]) -> None:
    by_rank = run(devices, all_pipelined, devices, cases)
    for (kind, _, settings), *ranks in zip(cases, *by_rank, strict=True):
        compare_ranks(ranks, fitted(kind, "auto", 1, **settings))


def compare_ranks(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for found in ranks:
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
        assert found["steps"] == expected["steps"]
        assert [each["what"] for each in found["seen"]] == [each["what"] for each in expected["seen"]]
    for number, plain in enumerate(expected["seen"]):
        names = set()
        for found in ranks:
            entry = found["seen"][number]
            assert entry["loss"] == pytest.approx(plain["loss"], rel=1e-12)
            for name, gradient in entry["gradients"].items():
                names.add(name)
                torch.testing.assert_close(gradient, plain["gradients"][name], rtol=1e-12, atol=1e-14)
        assert names == set(plain["gradients"])
    for name, value in expected["state"].items():
        torch.testing.assert_close(ranks[0]["state"][name], value, rtol=1e-11, atol=1e-13)


APART = [{"modules": ["generator"], "devices": [1]}, {"modules": ["critic", "@step"], "devices": [0]}]
CROSSED = [
    {"modules": ["generator.0", "generator.1", "generator.2"], "devices": [1]},
    {"modules": ["generator.3", "generator.4", "generator.5"], "devices": [0]},
    {"modules": ["critic.0", "critic.1", "critic.2"], "devices": [1]},
    {"modules": ["critic.3", "critic.4", "critic.5", "@step"], "devices": [0]},
]
SHARED = [{"modules": ["generator"], "devices": [1, 2]}, {"modules": ["critic", "@step"], "devices": [0]}]


def test_steps_that_run_once_are_those_of_one_process() -> None:
    """By hand, and through recomputed and offloaded stages."""
    measures = [{}, {"recompute": True}, {"offload": True}]
    retaining = [("Retaining", {"stages": CROSSED, **measure}, {}) for measure in measures]
    compare(2, [("Adversaries", {"stages": CROSSED}, {}), *retaining])


@pytest.mark.acceptance
def test_replicated_stage() -> None:
    compare(3, [("Accumulating", {"stages": SHARED}, {})])


@pytest.mark.acceptance
def test_pipelines_average_their_gradients() -> None:
    expected = fitted("Steady", "auto", 1, samples=16, size=16)  # one step per epoch: Lightning shuffles shards
    options = {"stages": CROSSED, "num_pipelines": 2, "num_micro_batches": 2}
    ranks = run(4, pipelined, 4, "Steady", options, {"samples": 16})
    for number, plain in enumerate(expected["seen"]):
        for found in ranks:
            for name, gradient in found["seen"][number]["gradients"].items():
                torch.testing.assert_close(gradient, plain["gradients"][name], rtol=1e-12, atol=1e-14)
    for name, value in expected["state"].items():
        torch.testing.assert_close(ranks[0]["state"][name], value, rtol=1e-11, atol=1e-13)


class Doubled(Steady):
    """Starts a backward by itself, although ranks share parameters."""

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Freed(Steady):
    """Asks for a second backward of a freed graph."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.critic(self(batch[1]))
        self.manual_backward(scores.mean())
        self.manual_backward(scores.square().mean())


class Late(Steady):
    """Differentiates a gradient after some steps, which no recording sees."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = self(batch[1])
        penalises = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed > 0
        (slope,) = torch.autograd.grad(self.critic(real).sum(), real, create_graph=bool(penalises))
        self.manual_backward(slope.square().sum() + self.critic(real).mean())


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "own backward with shared parameters": (Doubled, {"stages": SHARED}, "Use self.manual_backward"),
    "second backward": (Freed, {"stages": APART}, "second time, after its memory was freed.*retain_graph=True"),
    "gradient of a gradient, later": (Late, {"stages": APART}, "was asked for with create_graph=True.*of a module"),
}


def refused(rank: int, world_size: int, name: str) -> None:
    kind, options, _ = REFUSED[name]
    torch.manual_seed(0)
    trainer(strategy(**options), world_size).fit(kind().double(), loader())


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    _, options, words = REFUSED[name]
    world_size = 3 if options["stages"] is SHARED else 2
    with pytest.raises(AssertionError, match=f"(?s){words}"):
        run(world_size, refused, world_size, name)
