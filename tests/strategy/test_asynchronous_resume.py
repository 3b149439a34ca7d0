"""Asynchronous training resumes from a checkpoint in the middle of an epoch as the run that saved it went on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_gpp import GPPStrategy
from tests.sampling import sample
from tests.strategy import harness
from tests.strategy.test_asynchronous import CHAIN, STAGES, Towers, samples


class Resumable:
    """A loader that can go on from a position, and says how far it was read."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.position = loader, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number >= self.position:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def fit(settings: dict[str, Any], model: dict[str, Any], devices: int, **trainer: Any) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    module = Towers(**model)
    strategy = GPPStrategy(**{"num_micro_batches": 2, "failure_timeout": 60.0, "timeout": 60.0, "seed": 5, **settings})
    checkpoint = trainer.pop("ckpt_path", None)
    run = harness.trainer(strategy, devices=devices, max_epochs=2, num_sanity_val_steps=0, **trainer)
    run.fit(module, Resumable(DataLoader(samples(), batch_size=8)), ckpt_path=checkpoint)
    state = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    return {"losses": module.losses, "state": state, "seen": module.seen}


def interrupted(rank: int, cases: list[Any], folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every case in one run, and again from the checkpoint in the middle of its second epoch."""
    found = []
    for number, (settings, model) in enumerate(cases):
        saving = ModelCheckpoint(f"{folder}/{number}", every_n_train_steps=5, save_top_k=-1)
        undisturbed = fit(settings, model, 3, callbacks=[saving], enable_checkpointing=True)
        file = next(Path(f"{folder}/{number}").glob("*step=10.ckpt"))
        again = fit(settings, model, 3, ckpt_path=str(file))
        found.append((undisturbed, again))
    return found


DEEP = {"stages": CHAIN, "num_micro_batches": 1}
CASES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "few": [
        ({"weights": "stash", "state_dict_type": "sharded", "async_save": True, **DEEP}, {"in_line": True}),
        ({"weights": "double_buffer", "stages": STAGES}, {"optimizer": "plain"}),
        ({"weights": "corrected", **DEEP}, {"in_line": True, "optimizer": "AdamW"}),
        ({"weights": "predicted", "stages": STAGES}, {"optimizer": "AdamW"}),
    ],
    "others": [
        ({"weights": "stash", "weight_options": {"vertical_sync": True}, **DEEP}, {"in_line": True}),
        ({"weights": "latest", **DEEP}, {"in_line": True}),
        ({"weights": "corrected", "state_dict_type": "sharded", **DEEP}, {"in_line": True, "optimizer": "AdamW"}),
        ({"weights": "predicted", **DEEP}, {"in_line": True, "optimizer": "RMSprop"}),
        ({"weights": "predicted", "weight_options": {"bellwether": True}, "stages": STAGES}, {}),
        ({"weights": "error_feedback", "stages": STAGES}, {"optimizer": "plain"}),
    ],
}


@pytest.mark.parametrize("name", sample(CASES, ["few"]))
def test_a_checkpoint_from_anywhere_resumes_exactly(name: str, tmp_path: Path) -> None:
    first, *_ = harness.run(3, interrupted, CASES[name], str(tmp_path))
    for (settings, _), (undisturbed, again) in zip(CASES[name], first, strict=True):
        assert len(undisturbed["losses"]) == 14
        assert again["losses"] == undisturbed["losses"][10:], settings
        assert again["state"] == undisturbed["state"], settings
        assert again["seen"] == [8, 8, 8, 2], "what was read ahead is read again, and no more"
