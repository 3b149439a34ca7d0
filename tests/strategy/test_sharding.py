"""Whatever replicas split among them, training gives the numbers of plain Lightning on one process (float64)."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_gpp import ConfigError
from lightning_gpp.runtime.sharding.shards import local
from lightning_gpp.training.tensors.parameters import bytes_of
from lightning_gpp.training.tensors.replicas import ELEMENTWISE, check_elementwise, idle_sharding
from tests.strategies import chain
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader, make_data, make_module
from tests.strategy.test_checkpoints import assert_same_optimizer
from tests.strategy.test_training import EXACT, Report, plain

PIPELINES: dict[str, Any] = {
    "num_pipelines": 2,
    "num_micro_batches": 2,
    "stages": [
        {"modules": ["left"], "devices": [1]},
        {"modules": ["right"], "devices": [0]},
        {"modules": ["head", "@step"], "devices": [0]},
    ],
}
REPLICAS: dict[str, Any] = {
    "num_micro_batches": 4,
    "stages": [
        {"modules": ["left"], "devices": [1, 2, 3]},
        {"modules": ["right"], "devices": [2, 3]},
        {"modules": ["head", "@step"], "devices": [0]},
    ],
}
LAYOUTS = {"pipelines": PIPELINES, "replicas": REPLICAS}


class Watched(Callback):
    """Saves and loads in the middle, and notes what this rank keeps between steps."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.held: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        parameters = [parameter for parameter in module.parameters() if not parameter.is_meta]
        self.held = {
            "parameters": bytes_of(module),
            "gradients": sum(local(p.grad).nbytes for p in parameters if p.grad is not None),
            "state": harness.state_bytes(trainer.optimizers[0]),
        }

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.path and trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.path}.ckpt")
            checkpoint = trainer.strategy.load_checkpoint(f"{self.path}.ckpt", weights_only=False)
            trainer.strategy.load_model_state_dict(checkpoint)  # as a tuner does that tries and goes back
            trainer.strategy.load_optimizer_state_dict(checkpoint)


class Union(torch.utils.data.Sampler[list[int]]):
    """The mini-batches that two pipelines take together: batches of 4 each of every second sample."""

    def __iter__(self) -> Any:
        for start in range(0, 10, 4):
            rows = range(start, min(start + 4, 10))
            yield [2 * row + pipeline for pipeline in range(2) for row in rows]

    def __len__(self) -> int:
        return 3


def pipeline_loader(strategy: Any, samples: int = 20) -> DataLoader[Any]:
    sampler = DistributedSampler(make_data(samples), num_replicas=2, rank=strategy, shuffle=False)
    return DataLoader(make_data(samples), batch_size=4, sampler=sampler)


def fit(
    strategy: Any, devices: int, layout: str, path: str = "", ckpt_path: str | None = None, **settings: Any
) -> Report:
    """Two epochs of three steps; losses, parameters and what was held."""
    pl.seed_everything(3, verbose=False)
    module, watched = make_module(width=6), Watched(path)
    settings = {"gradient_clip_val": 0.05, "callbacks": [watched], **settings}
    trainer = harness.trainer(strategy, devices, **settings)
    if layout == "replicas":
        data = loader()
    elif devices == 1:
        data = DataLoader(make_data(20), batch_sampler=Union())
    else:
        data = pipeline_loader(torch.distributed.get_rank() // 2)
    validation = loader(8, batch_size=8 // (2 if devices > 1 and layout == "pipelines" else 1), seed=2)
    trainer.fit(module, data, None if "max_epochs" in settings else validation, ckpt_path=ckpt_path)
    if path:
        trainer.save_checkpoint(f"{path}-end.ckpt")
        trainer.validate(module, validation, verbose=False)
    return {
        "losses": module.losses,
        "val": [entry["val_loss"] for entry in module.metrics if "val_loss" in entry],
        "accuracies": [entry["val_acc"] for entry in module.metrics if "val_acc" in entry],
        "sampler": getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("rank"),
        "state": {name: value for name, value in module.state_dict().items() if not value.is_meta},
        "held": watched.held,
        "after": [float(trainer.callback_metrics["val_loss"])] if path else [],
        "moved": not any(isinstance(p, DTensor) for p in module.parameters()),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "clip by norm": {},
    "clip by value, accumulate 2": {
        "gradient_clip_algorithm": "value",
        "accumulate_grad_batches": 2,
        "max_epochs": 1,
    },
}


SAVED = [("pipelines", "zero1"), ("replicas", "zero1"), ("replicas", "fsdp")]
ALSO = [("replicas", "zero1", "clip by value, accumulate 2")]
RUNS = [*((layout, kind, "clip by norm") for layout, kind in SAVED), *ALSO]
RESUMED = ("pipelines", "fsdp", "zero1")
"""A layout and how it resumes, from which checkpoint."""


def fit_all(rank: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    plans: dict[str, Any] = {}
    for layout, kind in SAVED:
        strategy = harness.strategy(**LAYOUTS[layout], sharding=kind)
        found[layout, kind, "clip by norm"] = fit(strategy, 4, layout, f"{folder}/{layout}-{kind}")
        plans.setdefault(layout, strategy.plan)
    for layout, kind, name in ALSO:
        strategy = harness.strategy(**LAYOUTS[layout], sharding=kind, schedule="gpipe", self_check=False)
        found[layout, kind, name] = fit(strategy, 4, layout, **SETTINGS[name])
    layout, kind, before = RESUMED
    settings = {**LAYOUTS[layout], "stages": None, "num_micro_batches": None, "plan": plans[layout]}
    strategy = harness.strategy(**settings, sharding=kind, self_check=False)
    found["resumed"] = fit(strategy, 4, layout, ckpt_path=f"{folder}/{layout}-{before}.ckpt")
    found["sharding"] = strategy.plan and strategy.plan.sharding
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")
    expected: dict[Any, Any] = {}
    for layout in LAYOUTS:
        for name, settings in SETTINGS.items():
            path = f"{folder}/{layout}-plain" if name == "clip by norm" else ""
            expected[layout, name] = plain(lambda *a: fit(*a, **settings), "auto", 1, layout, path)  # noqa: B023
    return folder, expected, harness.run(4, fit_all, str(folder))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = theirs.abs().max().clamp(min=1e-3)
    assert ((ours - theirs).abs().max() / scale).item() <= 1e-12


def values_of(found: list[Any], key: Any, layout: str, what: str = "losses") -> list[float]:
    """Of the whole mini-batch: that of two pipelines is the mean of theirs."""
    if layout == "replicas":
        return list(found[0][key][what])
    return [(a + b) / 2 for a, b in zip(found[0][key][what], found[2][key][what], strict=True)]


@pytest.mark.parametrize(("layout", "kind", "name"), RUNS)
def test_equals_plain_lightning(runs: Any, layout: str, kind: str, name: str) -> None:
    _, expected, found = runs
    assert values_of(found, (layout, kind, name), layout) == pytest.approx(expected[layout, name]["losses"], **EXACT)
    validation = values_of(found, (layout, kind, name), layout, "val")
    assert validation == pytest.approx(expected[layout, name]["val"], **EXACT)
    after = values_of(found, (layout, kind, name), layout, "after")
    assert after == pytest.approx(expected[layout, name]["after"], **EXACT)
    assert set(found[0][layout, kind, name]["state"]) == set(expected[layout, name]["state"])
    samplers = [report[layout, kind, name]["sampler"] for report in found]
    assert samplers == ([0, 0, 1, 1] if layout == "pipelines" else [0] * 4)
    for report in found:
        accuracies = report[layout, kind, name]["accuracies"]  # a metric object is synchronised over pipelines
        assert accuracies == pytest.approx(expected[layout, name]["accuracies"])
        assert report[layout, kind, name]["moved"]
        for parameter, value in report[layout, kind, name]["state"].items():
            assert_close(value, expected[layout, name]["state"][parameter])


@pytest.mark.parametrize(("layout", "kind"), SAVED)
def test_checkpoints_are_those_of_plain_lightning(runs: Any, layout: str, kind: str) -> None:
    folder, _, _ = runs
    for end in (".ckpt", "-end.ckpt"):
        ours = torch.load(f"{folder}/{layout}-{kind}{end}", weights_only=False)
        theirs = torch.load(f"{folder}/{layout}-plain{end}", weights_only=False)
        assert list(ours["state_dict"]) == list(theirs["state_dict"])
        for name, value in theirs["state_dict"].items():
            assert type(ours["state_dict"][name]) is torch.Tensor
            torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-10, atol=1e-12)
        assert_same_optimizer(ours["optimizer_states"][0], theirs["optimizer_states"][0])


def test_a_run_resumes_under_another_sharding(runs: Any) -> None:
    folder, expected, found = runs
    layout, kind, _ = RESUMED
    rest = expected[layout, "clip by norm"]["losses"][3:]
    assert found[0]["sharding"] == kind  # and not that of the plan that was given
    assert values_of(found, "resumed", layout) == pytest.approx(rest, **EXACT)
    back = plain(fit, "auto", 1, "replicas", "", f"{folder}/replicas-fsdp.ckpt")
    assert back["losses"] == pytest.approx(expected["replicas", "clip by norm"]["losses"][3:], **EXACT)


def test_what_is_held_between_steps(runs: Any) -> None:
    """Rank 1 has `left` alone, of 72 numbers, with two others: the rows of its tensors are dealt in parts."""
    _, _, found = runs
    held = {kind: found[1]["replicas", kind, "clip by norm"]["held"] for kind in ("zero1", "fsdp")}
    whole = 72 * 8
    steps = 4 * 4  # Adam counts the steps of each tensor
    assert held["fsdp"] == {"parameters": whole // 3, "gradients": whole // 3, "state": 2 * whole // 3 + steps}
    assert held["zero1"]["parameters"] == whole
    states = [found[rank]["replicas", "zero1", "clip by norm"]["held"]["state"] for rank in (1, 2, 3)]
    right = 36 * 8  # on ranks 2 and 3; a third of it nobody uses, and its state is never made
    assert sum(states) == 2 * whole + steps + 2 * right * 24 // 36 + 2 * 4


TWO: dict[str, Any] = {
    "num_pipelines": 2,
    "num_micro_batches": 2,
    "failure_timeout": 20.0,
    "stages": [
        {"modules": ["left"], "devices": [0]},
        {"modules": ["right"], "devices": [0]},
        {"modules": ["head", "@step"], "devices": [0]},
    ],
}
"""Two pipelines of one device that has three stages."""


def fit_uneven(rank: int) -> dict[str, Any]:
    return fit_two(TwoTowers, "fsdp", uneven(rank))


def fit_two(cls: type[TwoTowers], kind: str, data: Any = None) -> dict[str, Any]:
    torch.manual_seed(2)
    module = cls().double()
    strategy = harness.strategy(**TWO, sharding=kind, self_check=False)
    trainer = harness.trainer(strategy, 2, gradient_clip_val=0.05)
    trainer.fit(module, Batches(list(data or pipeline_loader(torch.distributed.get_rank()))))
    return {"losses": module.losses, "state": module.state_dict()}


class Batches:
    """Each pipeline has its own; no sampler divides them."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def uneven(pipeline: int) -> list[Any]:
    """Mini-batches of which the first pipeline has 7 samples and the second 3, and so fewer micro-batches."""
    a, b, y = make_data(30).tensors
    rows = [slice(i, i + 7) if pipeline == 0 else slice(i + 7, i + 10) for i in (0, 10, 20)]
    return [(a[part], b[part], y[part]) for part in rows]


class Joint(TwoTowers):
    """The mean of the losses of two mini-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.loss(batch[0])[0] + self.loss(batch[1])[0]) / 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def fit_alone() -> dict[str, Any]:
    torch.manual_seed(2)
    module = Joint().double()
    harness.trainer(gradient_clip_val=0.05).fit(module, Batches(list(zip(uneven(0), uneven(1), strict=True))))
    return {"losses": module.losses, "state": module.state_dict()}


def test_pipelines_of_unequal_mini_batches_equal_plain_lightning() -> None:
    two, expected = harness.run(2, fit_uneven), plain(fit_alone)
    both = [(a + b) / 2 for a, b in zip(*(rank["losses"] for rank in two), strict=True)]
    assert both == pytest.approx(expected["losses"], **EXACT)
    for key, value in two[0]["state"].items():
        assert_close(value, expected["state"][key])


def test_refused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    check_elementwise([kind(parameters, lr=0.1) for kind in ELEMENTWISE])
    with pytest.raises(ConfigError, match=r"Adafactor, and strategy.sharding=fsdp.*Use strategy.sharding=zero1"):
        check_elementwise([torch.optim.Adafactor(parameters)])


def fit_unshared(rank: int) -> list[str]:
    """The warnings of a run whose only process holds everything, and that its gradients are whole."""
    strategy = harness.strategy(stages=[{"modules": ["left", "right", "head"]}], sharding="fsdp")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        module = make_module()
        harness.trainer(strategy, 1, max_epochs=1).fit(module, loader())
    assert all(type(parameter) is torch.nn.Parameter for parameter in module.parameters())
    return [str(warning.message) for warning in heard]


def test_nothing_to_split() -> None:
    alone = replace(chain((1, 1), 1), sharding="fsdp")
    assert "strategy.sharding=fsdp has nothing to split" in idle_sharding(alone, 1)
    assert idle_sharding(alone, 2) == ""
    (heard,) = harness.run(1, fit_unshared)
    assert any("strategy.sharding=fsdp has nothing to split" in message for message in heard)
