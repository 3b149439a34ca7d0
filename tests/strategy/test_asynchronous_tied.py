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
from tests.strategy.stale import trained
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
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.turned, self.drop = nn.Linear(4, 4), Turned(), nn.Dropout(dropout)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.double()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.drop(self.turned(self.first(x).tanh())))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[2])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(policy: str, dropout: float = 0.3, **trainer: Any) -> tuple[list[float], dict[str, Any]]:
    pl.seed_everything(3, verbose=False)
    module = Tied(dropout)
    strategy = GPPStrategy(
        stages=STAGES, num_micro_batches=1, weights=policy, seed=5, failure_timeout=60.0, timeout=60.0
    )
    checkpoint = trainer.pop("ckpt_path", None)
    run = harness.trainer(strategy, devices=3, num_sanity_val_steps=0, max_epochs=1, **trainer)
    run.fit(module, Resumable(DataLoader(samples(), batch_size=8)), ckpt_path=checkpoint)
    state = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    return module.losses, state


def interrupted(rank: int, folder: str) -> list[tuple[Any, Any]]:
    """A run with every policy, which saves after four mini-batches, and one that goes on from there."""
    found = []
    for policy in POLICIES:
        saving = ModelCheckpoint(f"{folder}/{policy}", every_n_train_steps=4, save_top_k=-1)
        whole = fit(policy, callbacks=[saving], enable_checkpointing=True)
        file = next(Path(f"{folder}/{policy}").glob("*step=4.ckpt"))
        found.append((whole, fit(policy, ckpt_path=str(file))))
    return [*found, (fit("stash", dropout=0.0), None)]


def test_shared_weights_train_as_with_the_same_delays_in_a_loop_and_resume(tmp_path: Path) -> None:
    *resumed, ((losses, state), _) = harness.run(3, interrupted, str(tmp_path))[0]
    for policy, ((all_losses, whole), (rest, end)) in zip(POLICIES, resumed, strict=True):
        assert rest == all_losses[4:], policy
        assert end == whole, policy
    module = Tied(dropout=0.0)
    expected = trained(
        module,
        module.configure_optimizers(),
        [DataLoader(samples(), batch_size=8)],
        lambda call, parts: nn.functional.cross_entropy(call(parts[0]), parts[2]),
        {"first": (2,), "turned": (1,), "last": (0,)},
    )
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, value in state.items():
        assert torch.allclose(torch.tensor(value, dtype=torch.float64), module.state_dict()[name], rtol=1e-10), name
