"""The search for the largest batch size: ranks agree on trials that do not fit one of them, and find what one finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import ConfigError
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, make_data


class Held(torch.autograd.Function):
    """Holds memory for each sample from its forward to its backward, of which there is enough for some."""

    samples: ClassVar[int] = 0

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, most: int) -> Tensor:
        Held.samples += len(tensor) if type(tensor) is Tensor else 0
        if Held.samples > most:
            Held.samples = 0
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        Held.samples -= len(gradients[0])
        return gradients[0], None


class Holding(nn.Module):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(4, 4), most

    def forward(self, values: Tensor) -> Tensor:
        held: Tensor = Held.apply(self.layer(values).tanh(), self.most)  # type: ignore[no-untyped-call]
        return held


class Sized(TwoTowers):
    """A tower fits `most` samples."""

    validation_step = None  # type: ignore[assignment]  # with it Lightning's search needs data to validate on

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left.insert(0, Holding(most))
        self.batch_size = 4

    def train_dataloader(self) -> Any:
        return DataLoader(make_data(40), batch_size=self.batch_size)


class Costly(torch.optim.SGD):
    """Its step needs memory for which the batch is too large, where there are weights of the tower."""

    owner: Sized

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        if self.owner.batch_size > self.owner.most and not self.owner.left[0].layer.weight.is_meta:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return result


class CostlySteps(Sized):
    def __init__(self, most: int) -> None:
        super().__init__(1000)
        self.most = most

    def configure_optimizers(self) -> Any:
        optimizer = Costly(self.parameters(), lr=0.1)
        optimizer.owner = self
        return optimizer


class Validated(Sized):
    validation_step = TwoTowers.validation_step  # type: ignore[assignment]


def searched(
    rank: int, folder: str, kind: type[Sized], devices: int, most: int, mode: str
) -> tuple[int, list[float], float]:
    torch.manual_seed(0)
    module = kind(most).double()
    strategy: Any = harness.strategy(num_micro_batches=2, schedule="gpipe") if devices > 1 else "auto"
    finder = BatchSizeFinder(mode=mode, steps_per_trial=2, max_trials=4, init_val=4)
    trainer = harness.trainer(strategy, devices, callbacks=[finder], default_root_dir=folder)
    trainer.fit(module)
    return module.batch_size, module.losses, float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize(
    ("kind", "most", "mode", "expected"),
    [
        (Sized, 16, "power", 16),
        (Sized, 16, "binsearch", 15),
        (Sized, 1000, "power", 32),
        (CostlySteps, 16, "power", 16),
    ],
)
def test_two_ranks_find_what_one_finds(tmp_path: Path, kind: type[Sized], most: int, mode: str, expected: int) -> None:
    """The tower that lacks memory is on rank 1; GPipe holds all samples there, as one process does."""
    ((size, losses, loss),) = harness.run(1, searched, str(tmp_path), kind, 1, most, mode)
    assert size == expected
    assert not [*tmp_path.iterdir()]
    for found in harness.run(2, searched, str(tmp_path), kind, 2, most, mode):
        assert found[0] == size
        assert found[1] == pytest.approx(losses, rel=1e-10)
        assert found[2] == pytest.approx(loss, rel=1e-10)
    assert not [*tmp_path.iterdir()]


def refused(rank: int, settings: dict[str, Any], method: str) -> str:
    trainer = harness.trainer(harness.strategy(**settings), 2, callbacks=[BatchSizeFinder()])
    module: Sized = (Sized if method == "fit" else Validated)(16).double()
    data: dict[str, Any] = {} if method == "fit" else {"dataloaders": DataLoader(make_data(), batch_size=4)}
    with pytest.raises(ConfigError) as caught:
        getattr(trainer, method)(module, **data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "method", "told"),
    [({"step": "whole"}, "fit", "a step as a whole"), ({}, "validate", "in trainer.validate")],
)
def test_trials_on_which_ranks_could_not_agree_are_refused(settings: dict[str, Any], method: str, told: str) -> None:
    for message in harness.run(2, refused, settings, method):
        assert "BatchSizeFinder runs trials that may fail on one device" in message
        assert told in message
