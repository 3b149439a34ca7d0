"""Attributes that hooks change, where modules that are cut read them: losses are those of one process all the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_gpp.errors import GPPError
from lightning_gpp.training.data.batches import SessionCache
from tests.strategy import harness


class Slots:
    __slots__ = ("scale",)


class Mode(Enum):
    PLAIN, HALVED = 1.0, 0.5


class Body(nn.Module):
    """A module that the stages cut between its two layers."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.temperature, self.squared, self.calls = 1.0, False, 0
        self.config = SimpleNamespace(scale=1.0, inner={"shift": 0.0, "loss": F.mse_loss})
        self.inner = nn.Sequential(nn.Identity())
        self.act, self.function, self.slots = nn.Identity(), torch.abs, Slots()
        self.numbers, self.tensors, self.slots.scale = np.ones(2), [torch.ones(6, dtype=torch.float64)], 1.0
        self.hydra = OmegaConf.create({"head": {"scale": 1.0}})
        self.mode, self.options = Mode.PLAIN, {"a", "b", "c"}

    def forward(self, x: Tensor, prior: Tensor | None = None) -> Tensor:
        h = self.a(x) / self.temperature
        h = h * self.config.scale * self.hydra.head.scale + self.config.inner["shift"]
        h = self.act(self.inner(h)) + self.function(h) * self.tensors[0] * float(self.numbers[0])
        h = h * self.factor * self.slots.scale * self.mode.value + self.offset()
        h = h if prior is None else h * prior
        h = h.square() if self.squared else h.tanh()
        return self.b(h if self.training else 2 * h)

    def offset(self) -> float:
        return float(len(self.options))


class Changing(pl.LightningModule):
    """Changes nothing; its subclasses do."""

    prior: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.prior = Body(), None
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.body(batch[0], self.prior), batch[2])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(F.cross_entropy(self.body(batch[0]), batch[2])))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Annealed(Changing):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.body.temperature = 1 / (1 + self.global_step)


class Configured(Changing):
    """Values inside of an object and of a dictionary in it, which an epoch replaces."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.body.config = SimpleNamespace(scale=0.5, inner={"shift": 0.25, "loss": F.mse_loss})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.body.config.inner["shift"] += 0.5


class Sundry(Changing):
    """Another thing in front of every mini-batch, except for the number `left_out`."""

    WHAT: tuple[Callable[[Body], Any], ...] = (
        lambda body: setattr(body, "act", nn.Tanh()),
        lambda body: setattr(body, "function", torch.sin),
        lambda body: body.numbers.fill(0.5),
        lambda body: body.tensors.__setitem__(0, torch.linspace(0, 1, 6, dtype=torch.float64)),
        lambda body: setattr(Body, "factor", 0.5),
        lambda body: setattr(body.slots, "scale", 3.0),
        lambda body: setattr(body, "act", nn.ReLU()),
        lambda body: body.options.clear(),
    )
    left_out: int | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step != self.left_out:
            self.WHAT[self.global_step](self.body)

    def on_fit_end(self) -> None:
        Body.factor = 1.0


class ByStep(Changing):
    """The step itself changes what the rank that runs it knows first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 1:
            self.body.mode, self.body.numbers = Mode.HALVED, np.zeros(2)
        return loss


class Swapped(Changing):
    """What is another one before the first mini-batch, and after the capture."""

    def on_train_start(self) -> None:
        self.body.function = torch.sin
        self.body.numbers.fill(0.5)
        self.body.tensors[0] = torch.linspace(0, 1, 6, dtype=torch.float64)


class Frozen(Changing):
    """`training` of a part is an attribute as well."""

    def on_train_epoch_start(self) -> None:
        self.body.train(self.current_epoch == 0)


class Optional(Changing):
    """An argument that is None at first."""

    def on_train_epoch_start(self) -> None:
        self.prior = torch.linspace(0.5, 2, 6, dtype=torch.float64) if self.current_epoch else None


class Replaced(Changing):
    """An argument that does not come from the mini-batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.prior = torch.full((6,), 1.0 + self.global_step, dtype=torch.float64)


class Truncated(Changing):
    """A recurrent network that goes on with the state after the last mini-batch; it is no tensor at first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.cell, self.head = nn.Identity(), nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)
        self.state: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found, state = self.cell(batch[0][:, None], self.state)
        self.state = state.detach()
        return F.cross_entropy(self.head(found[:, 0]), batch[2])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(0.0)


class Tempered(Changing):
    """Numbers that the step uses between its calls of modules, wherever they are; a counter decides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"sigma": 1.0, "name": "sigma"})
        self.tau, self.count, self.config = 1.0, 0, SimpleNamespace(scale=1.0, about={"depth": 3})
        self.shift = {"by": 0.0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = self.hparams.sigma * self.config.scale
        hidden = F.softmax(self.body.a(batch[0]) / self.tau, -1) * scale + self.shift["by"]
        self.log(f"{self.hparams.name} {self.count // 100}", 0.0)
        return F.cross_entropy(self.body.b(hidden), batch[2])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count += 1

    def on_train_epoch_start(self) -> None:
        self.tau, self.hparams.sigma = 1 / (1 + self.current_epoch), 1.0 + self.current_epoch
        self.config.scale, self.shift = 1.5 * (1 + self.current_epoch), {"by": 0.5 * self.current_epoch}


class Running(Changing):
    """The step keeps state in buffers in front of its last network call, up to which it runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count.add_(1)
        hidden = self.body.a(batch[0])
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return F.cross_entropy(self.body.b((hidden - self.mean).tanh()), batch[2]) + 0.1 * self.count


class Later(Changing):
    """A term of the loss begins in the second epoch, with a module that was not called before."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.share = torch.nn.Linear(6, 4), 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.body.a(batch[0])
        loss = F.cross_entropy(self.body.b(hidden), batch[2])
        return loss if self.share == 0 else loss + self.share * F.mse_loss(self.other(hidden), batch[0])

    def on_train_epoch_start(self) -> None:
        self.share = 0.5 * self.current_epoch


KINDS = {
    kind.__name__: kind
    for kind in (
        *(Annealed, Configured, Sundry, ByStep, Swapped, Frozen, Optional, Replaced, Truncated, Running),
        *(Tempered, Later, Changing),
    )
}
STAGES = {"body.a": 1, "body.b": 0}
ONLY_WHOLE = ("Truncated", "Running")
SAMPLE = ("Configured", "Sundry", "ByStep", "Swapped", "Frozen", "Optional", "Tempered", "Later")


def losses(name: str, strategy: Any = "auto", devices: int = 1, **attributes: Any) -> list[float]:
    module = KINDS[name]().double()
    vars(module).update(attributes)
    trainer = harness.trainer(strategy, devices, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, harness.loader(8 * len(Sundry.WHAT) // 2 if name == "Sundry" else 16), harness.loader(16))
    return module.losses


def in_stages(rank: int, name: str, **options: Any) -> list[float]:
    stages = {"cell": 1, "head": 0} if name == "Truncated" else STAGES
    return losses(name, harness.strategy(**{"stages": stages, "num_micro_batches": 2, **options}), 2)


def every_kind(rank: int, names: list[str], options: dict[str, Any]) -> dict[str, list[float]]:
    return {name: in_stages(rank, name, **options) for name in names}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (SAMPLE, {}),
        (ONLY_WHOLE, {"step": "whole"}),
        pytest.param([n for n in KINDS if n not in (*SAMPLE, *ONLY_WHOLE)], {}, marks=pytest.mark.acceptance),
        pytest.param(["Sundry", "Optional"], {"step": "whole"}, marks=pytest.mark.acceptance),
    ],
    ids=["micro_batches", "whole", "more", "more, whole"],
)
def test_losses_are_those_of_one_process(names: Sequence[str], options: dict[str, Any]) -> None:
    found, _ = harness.run(2, every_kind, list(names), options)
    expected = {name: losses(name) for name in dict.fromkeys((*names, "Changing"))}
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name
    assert all(expected[name] != expected["Changing"] for name in names if name != "Changing")


def without_flush(rank: int) -> str:
    with pytest.raises(GPPError, match="body.temperature changed while mini-batches are in the pipeline") as raised:
        in_stages(rank, "Annealed", weights="stash")
    return str(raised.value)


def test_a_pipeline_that_does_not_flush_refuses_a_change() -> None:
    harness.run(2, without_flush)


def test_captures_with_other_values_are_limited_and_told() -> None:
    told, made = list[str](), list[int]()
    cache = SessionCache[int](told.append)
    for value in [*range(12), 11, 0]:
        key = "form", value
        if key not in cache:
            cache.make(key, lambda value=value: made.append(value) or value, lambda: "tau")
    assert made == [*range(12), 0]
    assert len(cache) == 8
    assert len(told) == 1
    assert told[0].startswith("tau changed 3 times")


def test_sessions_of_many_lengths_are_limited() -> None:
    cache = SessionCache[int](print)
    for length in range(300):
        cache.make((length, ()), lambda length=length: length, str)
    assert [*cache.values()] == [*range(44, 300)]


def test_a_module_is_captured_once_for_what_it_computes() -> None:
    """A number that decides nothing may change all the time."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        counts, _ = harness.run(2, captures, ["Changing", "Tempered"])
    assert counts == [2, 4]  # training and validation, and both with the numbers of the second epoch


def captures(rank: int, names: list[str]) -> list[int]:
    from lightning_gpp.training.sessions import Sessions

    made, new = list[str](), Sessions.new
    Sessions.new = lambda self, *args, **kwargs: made.append("") or new(self, *args, **kwargs)  # type: ignore
    counts = list[int]()
    for name in names:
        made.clear()
        in_stages(rank, name)
        counts.append(len(made))
    return counts


class Sized(nn.Module):
    """Reads a list of numbers that has as many entries as the mini-batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, size: list[int]) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh()) * size[0] + size[1]
        return out


class ReadsLists(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network, self.losses = Sized(), list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch, [batch_idx + 1, 2 * batch_idx + 1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def fit_lists(rank: int, ranks: int) -> list[float]:
    module = ReadsLists().double()
    strategy = harness.strategy(stages=None, step="whole", num_micro_batches=2) if ranks > 1 else "auto"
    data = torch.utils.data.DataLoader(torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4), batch_size=2)  # type: ignore[arg-type]
    harness.trainer(strategy, devices=ranks, max_epochs=1, use_distributed_sampler=False).fit(module, data)
    return module.losses


def test_a_list_that_a_forward_reads_counts_with_its_values_in_a_step_as_a_whole() -> None:
    alone = fit_lists(0, 1)
    for losses in harness.run(2, fit_lists, 2):
        assert losses == pytest.approx(alone, rel=1e-12)
