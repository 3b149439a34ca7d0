"""Training in stages gives the numbers of plain Lightning on one process (float64)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_gpp import GPPStrategy
from lightning_gpp.training.tensors.parameters import bytes_of
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader, make_data, make_module

EXACT = {"rel": 1e-12, "abs": 1e-12}

Report = dict[str, Any]


def report(module: TwoTowers, trainer: pl.Trainer) -> Report:
    """What a run left behind, for comparison."""
    return {
        "losses": module.losses,
        "metrics": module.metrics,
        "state": {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "clip by norm": {"gradient_clip_val": 0.05},
    "clip by value, accumulate 2": {
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
        "accumulate_grad_batches": 2,
    },
}


def fit(name: str, strategy: Any, devices: int) -> Report:
    pl.seed_everything(7, verbose=False)
    module = make_module()
    trainer = harness.trainer(strategy, devices, **CONFIGS[name])
    trainer.fit(module, loader(shuffle=True), loader(10, seed=2))
    return report(module, trainer)


NAMES = (*CONFIGS, "clip by norm")


BOTH_WAYS = [{"modules": ["left"]}, {"modules": ["right", "head", "@step"]}]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"schedule": "gpipe"},
    {"schedule": "chimera", "sharding": "fsdp", "stages": BOTH_WAYS, "self_check": False},
]
"""For each of the configurations; the last one runs the first in both directions."""


def fit_all(rank: int) -> list[Report]:
    return [fit(name, harness.strategy(**options), 2) for name, options in zip(NAMES, OPTIONS, strict=True)]


def plain(function: Any, *args: Any) -> Any:
    """Run in this process; what plain Lightning warns about is not our subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def assert_equal(found: Report, expected: Report, whole: bool) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], **EXACT)
    assert found["metrics"] == [pytest.approx(entry, **EXACT) for entry in expected["metrics"]]
    assert [found[key] for key in ("lr", "steps", "epoch")] == [expected[key] for key in ("lr", "steps", "epoch")]
    if whole:
        assert found["state"].keys() == expected["state"].keys()
    for key, value in found["state"].items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(expected["state"][key]), rtol=1e-10, atol=1e-12)


def test_equals_plain_lightning_on_every_rank() -> None:
    for rank, found in enumerate(harness.run(2, fit_all)):
        for report_of_one, name, options in zip(found, NAMES, OPTIONS, strict=True):
            whole = rank == 0 and options.get("schedule") != "chimera"
            assert_equal(report_of_one, plain(fit, name, "auto", 1), whole)


class Held(Callback):
    """Notes what this rank holds while it trains."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        parameters = list(module.parameters())
        self.found = {
            "bytes": bytes_of(module),
            "grads": sum(p.grad.nbytes for p in parameters if p.grad is not None and not p.is_meta),
            "state": harness.state_bytes(trainer.optimizers[0]),
            "stepped": sum(len(group["params"]) for group in trainer.optimizers[0].param_groups),
            "names": [name for name, p in module.named_parameters() if not p.is_meta],
        }


def fit_and_measure(rank: int) -> dict[str, Any]:
    held = Held()
    module = make_module(width=32)
    harness.trainer(harness.strategy(self_check=True), 2, callbacks=[held], max_epochs=1).fit(module, loader())
    whole = not any(parameter.is_meta for parameter in module.parameters())
    return {**held.found, "whole": whole, "output": module(*make_data()[:3][:2]).tolist() if whole else None}


def test_each_rank_holds_only_its_own_parameters_gradients_and_optimizer_state() -> None:
    found = harness.run(2, fit_and_measure)
    module = make_module(width=32)
    left = sum(p.nbytes for p in module.left.parameters())
    rest = sum(p.nbytes for p in module.parameters()) - left
    unused = sum(p.nbytes for p in module.right[2].parameters())  # no stage computes with them: they stay on rank 0
    for rank, (own, idle, steps) in enumerate(((rest, unused, 4), (left, 0, 4))):
        assert found[rank]["bytes"] == own
        assert found[rank]["grads"] == own - idle
        assert found[rank]["state"] == 2 * (own - idle) + 4 * steps  # Adam counts steps in a float32 per parameter
    assert all(name.startswith("left.") for name in found[1]["names"])
    assert found[0]["whole"]  # after training rank 0's module can be called
    assert not found[1]["whole"]


def run_with_one_plan(rank: int, folder: str) -> list[Any]:
    """The stages of each run of a trainer, by name, modules and devices."""
    module = make_module()
    strategy = GPPStrategy(num_micro_batches=4, chain_baseline=True, max_replicas=1, search_seconds=1.0)
    trainer = harness.trainer(strategy, 2, max_epochs=1)
    runs = []
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.fit):
        run(module, loader(8), *([loader(8)] if run == trainer.fit else []))
        plan = strategy.plan
        runs.append([(stage.name, stage.modules, stage.devices) for stage in plan.stages] if plan else None)
    if rank == 0 and strategy.plan is not None:
        strategy.plan.save(f"{folder}/plan.yaml")
    trainer.strategy.barrier()
    given = GPPStrategy(plan=f"{folder}/plan.yaml")
    harness.trainer(given, 2).validate(module, loader(8), verbose=False)
    runs.append([(stage.name, stage.modules, stage.devices) for stage in given.plan.stages] if given.plan else None)
    return runs


def test_evaluation_keeps_the_plan_of_training(tmp_path: Path) -> None:
    first, *others = harness.run(2, run_with_one_plan, str(tmp_path))[0]
    assert first
    assert all(other == first for other in others)
