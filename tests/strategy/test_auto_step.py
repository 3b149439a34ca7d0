"""Steps that cannot run on micro-batches run as a whole, by default, and give the numbers of one process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import ConfigError
from lightning_gpp.errors import CaptureError
from tests.sampling import sample
from tests.strategy import harness


class Neighbours(pl.LightningModule):
    """A graph network: the samples of a mini-batch point at each other, so none can be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for layer in (self.first, self.second):
            sent = layer(x)[batch["edges"][0]]
            x = torch.zeros(len(x), 8, dtype=x.dtype).index_add(0, batch["edges"][1], sent).tanh()
        return F.cross_entropy(self.head(x), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Clouds(Neighbours):
    """Calls a module once per sample, on point clouds of different sizes."""

    validation_step = None

    def loss(self, batch: Any) -> Tensor:
        points = [self.second(self.first(cloud).tanh()).amax(0) for cloud in batch["clouds"]]
        return F.cross_entropy(self.head(torch.stack(points)), batch["y"])


class OwnBackward(Neighbours):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.second(self.first(batch["x"]).tanh()).tanh()), batch["y"])

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class Hooked(OwnBackward):
    """A loss of what a hook keeps of a layer."""

    backward = pl.LightningModule.backward
    trains = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        inner, self.first = self.first, nn.Sequential(self.first, nn.Tanh())  # type: ignore[assignment]
        inner.register_forward_hook(lambda module, args, result: self.kept.append(result))

    def loss(self, batch: Any) -> Tensor:
        self.kept.clear()
        kept = self.kept if self.trains or not self.training else []
        return super().loss(batch) + sum(each.square().mean() for each in kept)


class Averaged(OwnBackward):
    """A teacher whose weights are a mean of the student's, which the step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + F.mse_loss(self.first(batch["x"]), self.teacher(batch["x"]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
        return super().training_step(batch, batch_idx)


class Skipping(OwnBackward):
    """Skips every second mini-batch."""

    backward = Neighbours.backward

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            super().on_train_batch_end(outputs, batch, batch_idx)


STAGES = {"first": 1, "second": 0, "head": 0}
KINDS = {kind.__name__: kind for kind in (Neighbours, Clouds, OwnBackward, Averaged, Hooked, Skipping)}


def batches(number: int = 3) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def drawn(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    return [
        {
            "x": normal(8, 5),
            "edges": drawn(8, 2, 20),
            "y": drawn(3, 8),
            "clouds": [normal(3 + (n + cloud) % 4, 5) for cloud in range(8)],
        }
        for n in range(number)
    ]


def taken(kind: str) -> list[dict[str, Any]]:
    left_out = "clouds" if kind != "Clouds" else "edges"
    kept = [{name: value for name, value in batch.items() if name != left_out} for batch in batches()]
    return [{"clouds": each["clouds"], "y": each["y"]} for each in kept] if kind == "Clouds" else kept


def fit(strategy: Any, devices: int, kind: str) -> dict[str, Any]:
    module = KINDS[kind]().double()
    data = DataLoader(taken(kind), batch_size=None)
    validation = [] if KINDS[kind].validation_step is None else [data]
    trainer = harness.trainer(strategy, devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data, *validation)
    held = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    return {
        "losses": module.losses,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "state": held,
        "warned": any("runs as a whole" in str(warning.message) for warning in caught),
    }


def divided(rank: int, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    return fit(harness.strategy(**settings), 2, kind)


@pytest.mark.parametrize(
    "kind",
    sample(
        ["Neighbours", "Clouds", "OwnBackward", "Averaged", "Skipping"],
        ["OwnBackward", "Averaged", "Skipping"],
    ),
)
def test_numbers_are_those_of_one_process(kind: str) -> None:
    settings = {"stages": None, "max_replicas": 1} if kind == "Averaged" else {"stages": STAGES}
    found, other = harness.run(2, divided, kind, {**settings, "num_micro_batches": 2})
    expected = fit("auto", 1, kind)
    assert found["warned"] == (kind in ("Neighbours", "Clouds", "Skipping"))
    for each in (found, other):
        assert each["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert each["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
    for name, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(found["state"][name]), torch.tensor(value), rtol=1e-11, atol=1e-13)


def undivided(rank: int, kind: str) -> dict[str, Any]:
    return fit(harness.strategy(stages=None, num_micro_batches=2), 1, kind)


@pytest.mark.parametrize("kind", ["Neighbours", "Skipping"])
def test_one_process_needs_no_micro_batches(kind: str) -> None:
    (found,) = harness.run(1, undivided, kind)
    expected = fit("auto", 1, kind)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)


def refused(rank: int, kind: str, settings: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, CaptureError)) as caught:
        fit(harness.strategy(**settings), 2, kind)
    return str(caught.value)


@pytest.mark.parametrize("settings", [{"step": "micro_batches"}, {"sharding": "zero1"}])
def test_micro_batches_that_the_user_wants_are_kept(settings: dict[str, Any]) -> None:
    for message in harness.run(2, refused, "Clouds", {**settings, "num_micro_batches": 2}):
        assert "depends on the number of samples" in message


def test_values_that_a_hook_keeps_are_not_left_out() -> None:
    for message in harness.run(2, refused, "Hooked", {"stages": STAGES, "num_micro_batches": 2}):
        assert "the step reads a tensor that a module computed but did not return (a hook" in message


def test_weights_that_meet_are_on_one_device() -> None:
    settings = {"stages": {**STAGES, "teacher": 0}, "num_micro_batches": 2}
    for message in harness.run(2, refused, "Averaged", settings):
        assert "combines first.weight, teacher.weight with each other" in message
