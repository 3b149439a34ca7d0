"""Frozen copies of modules are where their originals are: averages of weights by hand work as on one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from lightning_gpp.capture.calls import capture_joint, find_calls, joint_batch
from lightning_gpp.hook_code import names_in_hooks
from lightning_gpp.training.frozen_copies import kept_with_originals, originals
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader


class Averaging(TwoTowers):
    """Validates with an average of the weights, which a hook updates; trains one tower later than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.right = self.right[:2]
        self.average = copy.deepcopy(nn.ModuleDict({"left": self.left, "head": self.head})).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)[0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        a, b, y = batch
        logits = self.average["head"](torch.cat([self.average["left"](a), self.right(b)], dim=1))
        self.log("val_loss", F.cross_entropy(logits, y))

    def on_train_epoch_start(self) -> None:
        self.left.requires_grad_(self.current_epoch > 0)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, average in self.average.items():
            for mean, weight in zip(average.parameters(), self.get_submodule(name).parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    def on_validation_epoch_end(self) -> None:
        """Keep nothing."""


def fitted(strategy: Any, devices: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Averaging().double()
    clipped = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    trainer = harness.trainer(strategy, devices, **clipped)
    trainer.fit(module, loader(), loader(10, seed=2))
    (again,) = trainer.validate(module, loader(12, seed=3), verbose=False)
    state = {name: value.tolist() for name, value in module.state_dict().items()} if trainer.is_global_zero else {}
    return {"epochs": module.metrics, "again": again, "state": state}


def divided(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    return fitted(harness.strategy(**settings), 2)


@pytest.mark.parametrize("step", ["auto", "whole"])
def test_averages_by_hand(step: str) -> None:
    found, other = harness.run(2, divided, {"step": step})
    expected = fitted("auto", 1)
    for each in (found, other):
        assert each["again"] == pytest.approx(expected["again"], rel=1e-12)
        for epoch, right in zip(each["epochs"], expected["epochs"], strict=True):
            assert epoch == pytest.approx(right, rel=1e-12)
    for name, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(found["state"][name]), torch.tensor(value), rtol=1e-11, atol=1e-13)


def used_by(module: nn.Module, *paths: str) -> set[str]:
    return {name for name, _ in module.named_parameters() if name.startswith(paths)}


def test_copies_are_found_by_class_names_and_shapes() -> None:
    module = nn.Module()
    module.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.fast = copy.deepcopy(module.net).requires_grad_(False)
    module.slow = copy.deepcopy(module.net).requires_grad_(False)
    module.other = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    module.begins_later = copy.deepcopy(module.net)
    found = originals(module, used_by(module, "net."))
    names = [*dict(module.net.named_parameters()), *dict(module.net.named_buffers())]
    assert found == {f"{kind}.{name}": f"net.{name}" for kind in ("fast", "slow") for name in names}


def renew(module: nn.Module) -> None:
    module.average.load_state_dict(module.net.state_dict())


class CopiedByHook(nn.Module):
    """A hook's function updates a copy that could learn, too; nothing updates another one."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.average, self.spare = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def on_train_batch_end(self) -> None:
        renew(self)


def test_a_copy_that_could_learn_is_one_if_a_hook_mentions_both() -> None:
    found = originals(CopiedByHook(), {"net.weight", "net.bias"})
    assert found == {"average.weight": "net.weight", "average.bias": "net.bias"}


def test_copies_that_could_be_of_several_modules_are_left() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    module.copies = nn.ModuleList(nn.Linear(2, 2) for _ in range(2)).requires_grad_(False)
    assert originals(module, used_by(module, "blocks.")) == {}
    module.copies.append(nn.Linear(2, 2).requires_grad_(False))
    assert originals(module, used_by(module, "blocks.1"))["copies.1.weight"] == "blocks.1.weight"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


class Distilled(pl.LightningModule):
    """A frozen teacher of the student's class, which no hook mentions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online, self.head = mlp(), nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.online(batch[0])), self.target(batch[0].flip(1)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Momentum(Distilled):
    """BYOL: the target is an average of the online network's weights."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.average()

    @torch.no_grad()
    def average(self) -> None:
        for mean, weight in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mean.mul_(0.9).add_(weight, alpha=0.1)


class WithoutGrad(Momentum):
    """The step calls the target without gradients, for which its parameters are not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.target.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.target(batch[0].flip(1))
        return F.mse_loss(self.head(self.online(batch[0])), wanted)


class UpdatesTarget(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        new = pl_module.online.state_dict()
        pl_module.target.load_state_dict({k: 0.9 * v + 0.1 * new[k] for k, v in pl_module.target.state_dict().items()})


class Thawed(Distilled):
    """A hook unfreezes the module; the other one is mentioned in another hook."""

    def on_train_epoch_start(self) -> None:
        self.target.requires_grad_(self.current_epoch > 0)

    def on_train_epoch_end(self) -> None:
        self.online.eval()


class ByName(Distilled):
    """The hook makes the names of the modules, in a property."""

    @property
    def parts(self) -> list[nn.Module]:
        return [getattr(self, name) for name in ("online", "target")]

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for weight, mean in zip(*(part.parameters() for part in self.parts), strict=True):
            mean.lerp_(weight, 0.1)


class ByPrefix(Distilled):
    """The hook puts the names of the modules together."""

    def __init__(self) -> None:
        super().__init__()
        self.student_net, self.teacher_net = self.online, self.target
        del self.online, self.target

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.student_net(batch[0])), self.teacher_net(batch[0].flip(1)))

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for part in ("net",):
            student, teacher = (getattr(self, prefix + part) for prefix in ("student_", "teacher_"))
            for mean, weight in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(weight, 0.1)


class Stacked(Momentum):
    """The frozen module is a layer in front of the trained one of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.online = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.target.requires_grad_(False)
        self.head = nn.Linear(4, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.online(self.target(batch[0]))).square().mean()


def losses_with(kind: type[Distilled], strategy: Any, devices: int) -> list[float]:
    module = (Distilled if kind is UpdatesTarget else kind)().double()
    callbacks = [UpdatesTarget()] if kind is UpdatesTarget else []
    harness.trainer(strategy, devices, callbacks=callbacks, max_epochs=1).fit(module, loader())
    return module.losses


def in_stages(rank: int, settings: dict[str, Any]) -> list[list[float]]:
    options = {"stages": None, "num_micro_batches": 2, "search_seconds": 0.2, **settings}
    return [losses_with(kind, harness.strategy(**options), 2) for kind in (Momentum, UpdatesTarget, WithoutGrad)]


@pytest.mark.parametrize("settings", [{}, {"step": "whole"}], ids=["micro-batches", "whole"])
def test_momentum_encoders_train_in_the_stages_of_the_planner(settings: dict[str, Any]) -> None:
    found, _ = harness.run(2, in_stages, settings)
    for kind, losses in zip((Momentum, UpdatesTarget, WithoutGrad), found, strict=True):
        assert losses == pytest.approx(losses_with(kind, "auto", 1), rel=1e-12)
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0] != pytest.approx(losses_with(Distilled, "auto", 1), rel=1e-6)


def clusters(kind: type[Distilled]) -> dict[str, str]:
    module = kind().double()
    graph = kept_with_originals(capture_step(module, next(iter(loader()))).graph, module)
    return {name: operator.cluster for operator in graph for name in operator.parameters}


@pytest.mark.parametrize("kind", [Momentum, ByName])
def test_copies_that_hooks_update_are_tied_layer_by_layer(kind: type[Distilled]) -> None:
    found = clusters(kind)
    assert found["target.0.weight"] == found["online.0.weight"] != found["online.2.weight"] == found["target.2.weight"]
    assert found["head.weight"] == ""


def test_copies_that_a_step_as_a_whole_calls_without_gradients_are_tied() -> None:
    module, batch, place = WithoutGrad().double(), next(iter(loader())), torch.device("cpu")
    calls = find_calls(module, batch, context=nullcontext, device=place, stand_ins=lambda _: {})
    graph = capture_joint(module, joint_batch(calls.arguments, len(batch[0])), context=nullcontext, device=place).graph
    tied = kept_with_originals(graph, module, calls.learning)
    found = {name: operator.cluster for operator in tied for name in operator.parameters}
    assert calls.learning == {"online", "head"}
    assert found["target.0.weight"] == found["online.0.weight"] != found["head.weight"] == ""


def test_copies_are_tied_if_hooks_put_their_names_together() -> None:
    found = clusters(ByPrefix)
    assert found["teacher_net.0.weight"] == found["student_net.0.weight"] != found["student_net.2.weight"]


@pytest.mark.parametrize("kind", [Distilled, Thawed, Stacked])
def test_teachers_and_layers_are_no_copies(kind: type[Distilled]) -> None:
    assert set(clusters(kind).values()) == {""}


def test_names_in_hooks_are_those_of_the_methods_that_they_call() -> None:
    (names,) = names_in_hooks([Momentum()], [])
    assert {"average", "target", "online", "mul_"} <= names
    assert "head" not in names
    assert all("target" not in names for names in names_in_hooks([Distilled()], []))
    assert any("target" in names for names in names_in_hooks([Distilled(), UpdatesTarget()], []))


class Texts(pl.Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.get_submodule(f"encoders.{trainer.name}_momentum")
        "_".join(name for name in trainer.names if name in {"left", "right"})
        pl_module.weight.mul_(2)


def test_texts_in_hooks_are_names_and_patterns_of_names() -> None:
    (names,) = names_in_hooks([Texts()], [])
    assert {"encoders", "*_momentum", "left", "right"} <= names
    assert not {"*_", "_*", "mul_*"} & names
