"""A weight that two stages of different delays share, and a value whose memory is not in order between stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import GPPStrategy
from tests.strategy import harness
from tests.strategy.test_asynchronous import samples
from tests.strategy.test_asynchronous_resume import Resumable

STAGES = [
    {"name": "first", "modules": ["first"], "devices": [2]},
    {"name": "turned", "modules": ["turned"], "devices": [1]},
    {"name": "last", "modules": ["last", "@step"], "devices": [0]},
]
POLICIES = ["stash", "predicted"]


class Turned(nn.Module):
    """A product whose result is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.T).T


class Tied(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.turned, self.drop = nn.Linear(4, 4), Turned(), nn.Dropout(0.3)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.double()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.drop(self.turned(self.first(batch[0]).tanh()))
        loss: Tensor = nn.functional.cross_entropy(self.last(hidden), batch[2])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(policy: str, devices: int, **trainer: Any) -> tuple[list[float], dict[str, Any]]:
    pl.seed_everything(3, verbose=False)
    module = Tied()
    delayed = {"delayed_devices": 3} if devices == 1 else {}
    strategy = GPPStrategy(
        stages=STAGES, num_micro_batches=1, weights=policy, seed=5, failure_timeout=60.0, timeout=60.0, **delayed
    )
    checkpoint = trainer.pop("ckpt_path", None)
    run = harness.trainer(strategy, devices=devices, num_sanity_val_steps=0, max_epochs=1, **trainer)
    run.fit(module, Resumable(DataLoader(samples(), batch_size=8)), ckpt_path=checkpoint)
    state = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    return module.losses, state


def saved(policy: str, devices: int, folder: str) -> tuple[list[float], dict[str, Any]]:
    """A run that saves after four mini-batches, for which the pipeline fills again."""
    saving = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
    return fit(policy, devices, callbacks=[saving], enable_checkpointing=True)


def interrupted(rank: int, folder: str) -> list[tuple[Any, Any]]:
    """A run with every policy, and one that goes on from a checkpoint of it."""
    found = []
    for policy in POLICIES:
        whole = saved(policy, 3, f"{folder}/{policy}")
        file = next(Path(f"{folder}/{policy}").glob("*step=4.ckpt"))
        found.append((whole, fit(policy, 3, ckpt_path=str(file))))
    return found


def alone(rank: int, folder: str) -> list[tuple[list[float], dict[str, Any]]]:
    return [saved(policy, 1, f"{folder}/{policy}, alone") for policy in POLICIES]


def test_shared_weights_train_as_with_the_same_delays_on_one_device_and_resume(tmp_path: Path) -> None:
    (expected,) = harness.run(1, alone, str(tmp_path))
    results = harness.run(3, interrupted, str(tmp_path))
    for number, policy in enumerate(POLICIES):
        (losses, state), (rest, end) = results[0][number]
        assert losses == pytest.approx(expected[number][0], rel=1e-12), policy
        assert rest == losses[4:], policy
        for name, value in expected[number][1].items():
            assert torch.allclose(torch.tensor(state[name]), torch.tensor(value), rtol=1e-10), (policy, name)
            assert end[name] == state[name], (policy, name)
