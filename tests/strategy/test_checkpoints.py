"""Checkpoints are those of plain Lightning: it loads them, and so does any other plan; resumed runs go on alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gpp import CheckpointError
from lightning_gpp.training.updates.optimizers import OptimizerIndex
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader, make_module
from tests.strategy.test_training import EXACT, plain

OTHER_PLAN = [
    {"modules": ["right", "left.0"], "devices": [1]},
    {"modules": ["left.1", "left.2", "head", "@step"], "devices": [0]},
]


class Dropping(TwoTowers):
    """Random numbers in both stages."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.dropout(a, 0.3, self.training), b)


def checkpointing(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", mode="min", save_top_k=-1)


def fit(folder: str, strategy: Any, devices: int, ckpt_path: str | None = None) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module, callback = make_module(), checkpointing(folder)
    trainer = harness.trainer(
        strategy, devices, max_epochs=4, callbacks=[callback], enable_checkpointing=True, gradient_clip_val=0.3
    )
    trainer.fit(module, loader(), loader(10, seed=2), ckpt_path=ckpt_path)
    return {"losses": module.losses, "best": callback.best_model_path, "score": float(callback.best_model_score or 0)}


def fit_and_resume(rank: int, folder: str) -> dict[str, Any]:
    middle = f"{folder}/whole/epoch=1.ckpt"
    other = harness.strategy(stages=OTHER_PLAN)
    return {
        "whole": fit(f"{folder}/whole", harness.strategy(), 2),
        "same": fit(f"{folder}/same", harness.strategy(), 2, middle),
        "other": fit(f"{folder}/other", other, 2, middle),
        "foreign": fit(f"{folder}/foreign", harness.strategy(), 2, f"{folder}/plain/epoch=1.ckpt"),
        "dropout": resumed_dropout(f"{folder}/dropout"),
        "refused": refused(folder),
    }


def resumed_dropout(folder: str) -> list[list[float]]:
    """Losses of the last epoch of an undisturbed run and of a resumed one: random streams go on where they were."""
    found = []
    for path in (None, f"{folder}/epoch=0.ckpt"):
        pl.seed_everything(5, verbose=False)
        module = Dropping().double()
        callback = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        trainer = harness.trainer(harness.strategy(), 2, callbacks=[callback], enable_checkpointing=True)
        trainer.fit(module, loader(), ckpt_path=path)
        found.append(module.losses[-3:])
    return found


def refused(folder: str) -> list[str]:
    """Messages for checkpoints that do not fit; every rank must raise them before it waits for another."""
    messages = []
    for number, change in enumerate((_without_head, _wider, _other_optimizer)):
        checkpoint = torch.load(f"{folder}/plain/epoch=3.ckpt", weights_only=False)
        change(checkpoint)
        path = f"{folder}/bad{number}-{torch.distributed.get_rank()}.ckpt"
        torch.save(checkpoint, path)
        strategy = harness.strategy()
        try:
            load(path, strategy)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def load(path: str, strategy: Any) -> None:
    """Load into a module or its optimizer without a run: an error on all ranks at once would end the processes."""
    module, checkpoint = make_module(), strategy.load_checkpoint(path, weights_only=False)
    strategy.connect(module)
    strategy.load_model_state_dict(checkpoint)
    index = OptimizerIndex(torch.optim.AdamW(module.parameters()), module)
    index.load(checkpoint["optimizer_states"][0])


def _without_head(checkpoint: dict[str, Any]) -> None:
    del checkpoint["state_dict"]["head.weight"]
    checkpoint["state_dict"]["tail.weight"] = torch.zeros(1)


def _wider(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["head.weight"] = torch.zeros(3, 14, dtype=torch.float64)


def _other_optimizer(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["param_groups"][0]["params"].pop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    expected = plain(fit, f"{folder}/plain", "auto", 1)
    return folder, expected, harness.run(2, fit_and_resume, str(folder))


def test_monitored_checkpoints_are_those_of_plain_lightning(runs: Any) -> None:
    folder, expected, found = runs
    for report in found:
        assert report["whole"]["score"] == pytest.approx(expected["score"], **EXACT)
        assert Path(report["whole"]["best"]).name == Path(expected["best"]).name
    ours = torch.load(folder / "whole/epoch=1.ckpt", weights_only=False)
    theirs = torch.load(folder / "plain/epoch=1.ckpt", weights_only=False)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    assert set(ours) - set(theirs) == {"gpp"}
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-10, atol=1e-12)
    assert_same_optimizer(ours["optimizer_states"][0], theirs["optimizer_states"][0])


def assert_same_optimizer(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(ours["state"][key][name], value, rtol=1e-9, atol=1e-12)


def test_a_resumed_run_under_any_plan_gives_the_same_losses(runs: Any) -> None:
    _, _, found = runs
    for report in found:
        rest = report["whole"]["losses"][6:]
        assert report["same"]["losses"] == pytest.approx(rest, **EXACT)
        assert report["other"]["losses"] == pytest.approx(rest, **EXACT)
        assert report["foreign"]["losses"] == pytest.approx(rest, **EXACT)
        undisturbed, resumed = report["dropout"]
        assert resumed == undisturbed


def test_plain_lightning_loads_and_resumes(runs: Any) -> None:
    folder, _, found = runs
    module = TwoTowers.load_from_checkpoint(folder / "whole/epoch=1.ckpt", weights_only=False)
    assert module.head.weight.dtype == torch.float32
    resumed = plain(fit, f"{folder}/back", "auto", 1, f"{folder}/whole/epoch=1.ckpt")
    assert resumed["losses"] == pytest.approx(found[0]["whole"]["losses"][6:], **EXACT)


@pytest.mark.parametrize(
    ("number", "match"),
    [
        (0, "(?s)Missing key.*head.weight.*Unexpected key.*tail.weight"),
        (1, "size mismatch for head.weight"),
        (2, "groups"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(runs: Any, number: int, match: str) -> None:
    _, _, found = runs
    assert all(re.search(match, report["refused"][number], re.DOTALL) for report in found)
