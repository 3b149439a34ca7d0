"""Lightning's callbacks that copy, average or unfreeze parameters give what they give on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)

from lightning_gpp._compat.torch import pytree
from tests.sampling import sample
from tests.strategy.harness import STAGES, TwoTowers, loader, run, strategy, trainer


class Plain(TwoTowers):
    """Two towers without BatchNorm, whose first one is the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.right = self.right[:2]
        self.backbone = self.left

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        loss = self.loss(batch)[0]
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Saving(Callback):
    """Saves in the middle of training."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, machine: Any, module: Any) -> None:  # type: ignore[override]
        if machine.current_epoch == 2:
            machine.save_checkpoint(self.path)


def callback(kind: str) -> Callback:
    made: dict[str, Any] = {
        "stochastic": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
        "exponential": lambda: EMAWeightAveraging(decay=0.9),
        "finetuning": lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5),
        "learning rate": lambda: LearningRateFinder(min_lr=1e-3, max_lr=0.5, num_training_steps=6),
    }
    return made[kind]()  # type: ignore[no-any-return]


def fitted(given: Any, devices: int, kind: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Plain().double()
    added = callback(kind)
    machine = trainer(given, devices, max_epochs=4, callbacks=[added, Saving(f"{folder}/{devices}")])
    machine.fit(module, loader(), loader(10, seed=2))
    return {
        "losses": module.losses,
        "metrics": {name: float(value) for name, value in machine.callback_metrics.items()},
        "groups": [group["lr"] for group in machine.optimizers[0].param_groups],
        "state": {name: value for name, value in module.state_dict().items() if not value.is_meta},
        "searched": added.optimal_lr.results["loss"] if isinstance(added, LearningRateFinder) else [],
    }


def on_two(rank: int, kind: str, folder: str) -> dict[str, Any]:
    return fitted(strategy(stages=STAGES), 2, kind, folder)


def compare(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        if isinstance(there, torch.Tensor | float):
            torch.testing.assert_close(here, there, rtol=1e-11, atol=1e-13)
        elif isinstance(there, str | int | bool):
            assert here == there


@pytest.mark.parametrize(
    "kind", sample(["stochastic", "exponential", "finetuning", "learning rate"], ["exponential", "finetuning"])
)
def test_as_on_one_process(kind: str, tmp_path: Path) -> None:
    expected = fitted("auto", 1, kind, str(tmp_path))
    ranks = run(2, on_two, kind, str(tmp_path))
    for found in ranks:
        for name in ("losses", "metrics", "groups", "searched"):
            assert found[name] == pytest.approx(expected[name], rel=1e-11), name
    saved, plain = (torch.load(tmp_path / str(devices), weights_only=False) for devices in (2, 1))
    for name in ("state_dict", "current_model_state", "callbacks"):
        compare(pytree.tree_leaves(saved.get(name)), pytree.tree_leaves(plain.get(name)))
    for name, value in expected["state"].items():
        torch.testing.assert_close(ranks[0]["state"][name], value, rtol=1e-11, atol=1e-13)


def resumed(given: Any, devices: int, path: str) -> list[float]:
    torch.manual_seed(0)
    module = Plain().double()
    machine = trainer(given, devices, max_epochs=4, callbacks=[callback("finetuning")])
    machine.fit(module, loader(), loader(10, seed=2), ckpt_path=path, weights_only=False)
    assert [len(group["params"]) for group in machine.optimizers[0].param_groups][1:]
    return module.losses


def resumed_on_two(rank: int, path: str) -> list[float]:
    return resumed(strategy(stages=STAGES), 2, path)


def test_groups_that_a_callback_added_are_there_after_a_resumption(tmp_path: Path) -> None:
    fitted("auto", 1, "finetuning", str(tmp_path))
    expected = resumed("auto", 1, str(tmp_path / "1"))
    for losses in run(2, resumed_on_two, str(tmp_path / "1")):
        assert losses == pytest.approx(expected, rel=1e-11)
