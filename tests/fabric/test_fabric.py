"""A loop with Lightning Fabric gives the numbers of the same loop in one process (float64)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpp_examples import fabric_loop
from gpp_examples.plain_loop import Branches, batches
from lightning_gpp import ConfigError, GPPFabricStrategy, PlanError
from tests.strategy.harness import run

STAGES = {"left": 0, "right": 1, "head": 1}
CHAIN = {"left": 0, "right": 1, "head": 2}
OTHERS = {"left": 0, "right": 0, "head": 1}


def fabric_of(world: int, **options: Any) -> Fabric:
    settings = {"stages": STAGES, "num_micro_batches": 4, "timeout": 40.0, "failure_timeout": 20.0, **options}
    fabric = Fabric(accelerator="cpu", devices=world, strategy=GPPFabricStrategy(**settings))
    fabric.launch()
    return fabric


def end(fabric: Fabric) -> None:
    fabric.strategy.teardown()


def example(rank: int, path: str) -> list[float]:
    fabric = fabric_of(2)
    losses = fabric_loop.train(fabric, fabric_loop.samples(), path)
    end(fabric)
    return losses


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """The loop of the example without Fabric."""
    torch.manual_seed(1)
    model = Branches().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for a, b, labels in batches():
        loss = nn.functional.cross_entropy(model(a, b), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_losses_and_weights_are_those_of_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt")
    first, second = run(2, example, path)
    losses, weights = alone()
    assert first == second == pytest.approx(losses, rel=1e-12)
    saved = torch.load(path, weights_only=False)
    torch.testing.assert_close(saved["model"], weights, rtol=1e-12, atol=1e-12)
    assert len(saved["optimizer"]["state"]) == len(weights)


class Noisy(Branches):
    """Draws dropout in a stage, and has a second output."""

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        left = self.left(a)
        return {"logits": self.head(torch.cat([left, self.right(b)], dim=1)), "left": left}


def loss_of(results: dict[str, Tensor], labels: Tensor) -> Tensor:
    """A loss over all pairs of samples, which micro-batches do not have."""
    pairs = results["left"] @ results["left"].T
    return nn.functional.cross_entropy(results["logits"], labels) + pairs.square().mean()


def gradients(rank: int, options: dict[str, Any], world: int) -> tuple[list[float], dict[str, list[Any]]]:
    """Gradients of two backwards, accumulated; an evaluation comes between."""
    fabric = fabric_of(world, **options)
    torch.manual_seed(1)
    module = Noisy().double()
    model, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    losses = []
    for a, b, labels in fabric.setup_dataloaders(DataLoader(batches(2), batch_size=None)):
        with torch.no_grad():
            losses.append(float(loss_of(model(a, b), labels)))
        loss = loss_of(model(a, b), labels)
        fabric.backward(loss)
        losses.append(loss.item())
    found = {n: p.grad.tolist() for n, p in module.named_parameters() if not p.is_meta and p.grad is not None}
    end(fabric)
    return losses, found


@pytest.mark.parametrize(("options", "world"), [({"stages": CHAIN}, 3), ({"stages": None}, 2)], ids=str)
def test_gradients_are_those_of_one_process(options: dict[str, Any], world: int) -> None:
    torch.manual_seed(1)
    model = Noisy().double()
    losses = []
    for a, b, labels in batches(2):
        loss = loss_of(model(a, b), labels)
        loss.backward()
        losses += [loss.item()] * 2
    found: dict[str, list[Any]] = {}
    for rank_losses, rank_gradients in run(world, gradients, options, world):
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        found |= rank_gradients
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        actual = torch.tensor(found[name], dtype=torch.float64)
        torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)


def replicas(rank: int) -> list[float]:
    """Two pipelines, between which Fabric divides the samples."""
    fabric = fabric_of(4, num_pipelines=2, num_micro_batches=2)
    samples = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(), strict=True)))
    losses = fabric_loop.train(fabric, DataLoader(samples, batch_size=16))
    means = [float(fabric.all_reduce(torch.tensor(loss, dtype=torch.float64))) for loss in losses]
    end(fabric)
    return means


def test_pipelines_divide_the_samples() -> None:
    expected = alone()[0]
    assert all(losses == pytest.approx(expected, rel=1e-12) for losses in run(4, replicas))


def resumed(rank: int, path: str, late: bool) -> list[float]:
    """The second half of the example, from a checkpoint that is loaded before or after the module is divided."""
    fabric = fabric_of(2, stages=OTHERS)
    model = Branches().double()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    data = fabric.setup_dataloaders(DataLoader(batches()[10:], batch_size=None))
    if late:
        with torch.no_grad():
            model(*batches()[0][:2])
    state = {"model": model, "optimizer": optimizer, "count": 0}
    assert fabric.load(path, state) == {}
    assert state["count"] == 10
    losses = []
    for a, b, labels in data:
        loss = nn.functional.cross_entropy(model(a, b), labels)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    end(fabric)
    return losses


def half(rank: int, path: str) -> None:
    fabric = fabric_of(2)
    torch.manual_seed(1)
    model = Branches().double()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for a, b, labels in fabric.setup_dataloaders(DataLoader(batches()[:10], batch_size=None)):
        fabric.backward(nn.functional.cross_entropy(model(a, b), labels))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, {"model": model, "optimizer": optimizer, "count": 10})
    end(fabric)


@pytest.mark.acceptance
def test_resumes_under_another_plan(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    run(2, half, path)
    for late in (False, True):
        first, second = run(2, resumed, path, late)
        assert first == second == pytest.approx(alone()[0][10:], rel=1e-12)


class Stepping(Branches):
    """Has another method that calls its modules."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return self(a, b).mean()


def refused(rank: int) -> None:
    strategy = GPPFabricStrategy(stages={"left": 0, "right": 0, "head": 0}, self_check=False)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    with pytest.raises(PlanError, match="made at the first call"):
        strategy.plan  # noqa: B018
    module = Stepping().double()
    model = fabric.setup(module)
    with pytest.raises(ConfigError, match="given a second module"):
        fabric.setup(Branches())
    with pytest.raises(ConfigError, match="call the module that fabric.setup returned first"):
        fabric.clip_gradients(model, torch.optim.SGD(module.parameters()), max_norm=1.0)
    a, b, _ = batches(1)[0]
    model(a, b)
    assert strategy.plan.num_devices == 1
    with pytest.raises(ConfigError, match="before the first call"):
        fabric.setup_optimizers(torch.optim.SGD(module.parameters()))
    model.mark_forward_method("loss")
    with pytest.raises(ConfigError, match="other than its forward was called"):
        model.loss(a, b)


def test_what_cannot_work_is_refused() -> None:
    run(1, refused)


@pytest.mark.parametrize(
    "options",
    [
        {"step": "micro_batches"},
        {"tensor_parallel_size": 2},
        {"streaming": True},
        {"async_save": True},
    ],
    ids=str,
)
def test_options_of_a_step_that_lightning_runs(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not go together with Fabric"):
        GPPFabricStrategy(**options)
