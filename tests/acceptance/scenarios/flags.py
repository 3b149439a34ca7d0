"""Flags of the trainer, of its loops, and of precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from tests.acceptance.scenarios.base import (
    Chain,
    Facts,
    Make,
    build,
    caught,
    facts_of,
    family,
    fitted,
    loader,
    scenario,
    validated,
)


def _flag(make: Make, folder: Path, **options: Any) -> Facts:
    return validated(make, **options)


family(
    "flag",
    _flag,
    {
        "accumulate": {"accumulate_grad_batches": 2},
        "clip_norm": {"gradient_clip_val": 0.05},
        "clip_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        "limit_train": {"limit_train_batches": 2},
        "limit_fraction": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
        "no_validation": {"limit_val_batches": 0},
        "check_every_two_epochs": {"check_val_every_n_epoch": 2, "max_epochs": 4},
        "check_within_epoch": {"val_check_interval": 1},
        "check_fraction": {"val_check_interval": 0.34},
        "check_by_batches": {"val_check_interval": 4, "check_val_every_n_epoch": None},
        "max_steps": {"max_steps": 4, "max_epochs": -1},
        "min_epochs": {"min_epochs": 2, "max_epochs": 3},
        "max_time": {"max_time": "00:01:00:00"},
        "overfit": {"overfit_batches": 1},
        "fast_dev_run": {"fast_dev_run": True},
        "fast_dev_run_two": {"fast_dev_run": 2},
        "no_sanity": {"num_sanity_val_steps": 0},
        "all_sanity": {"num_sanity_val_steps": -1},
        "detect_anomaly": {"detect_anomaly": True},
        "simple_profiler": {"profiler": "simple"},
        "advanced_profiler": {"profiler": "advanced"},
        "deterministic": {"deterministic": True},
        "no_inference_mode": {"inference_mode": False},
        "reload_loaders": {"reload_dataloaders_every_n_epochs": 1},
        "log_every_step": {"log_every_n_steps": 1},
        "double": {"precision": "64-true"},
        "progress_bar": {"enable_progress_bar": True},
        "summary": {"enable_model_summary": True},
        "barebones": {
            "barebones": True,
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")),
        },
        "no_sampler_change": {"use_distributed_sampler": False},
    },
)


@scenario
def bfloat16(make: Make, folder: Path) -> Facts:
    facts = fitted(make, precision="bf16-mixed")
    return {"steps": facts["steps"], "about": [round(value, 1) for value in facts["losses"]]}


@scenario
def pytorch_profiler(make: Make, folder: Path) -> Facts:
    from lightning.pytorch.profilers import PyTorchProfiler

    profiler = PyTorchProfiler(dirpath=str(folder), filename="profile", record_module_names=True)
    facts = validated(make, profiler=profiler)
    return {**facts, "zero files": any("profile" in file.name for file in folder.iterdir())}


class Interrupting(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


@scenario
def stop_in_step(make: Make, folder: Path) -> Facts:
    return fitted(make, build(Interrupting), max_epochs=4)


@scenario
def two_fits(make: Make, folder: Path) -> Facts:
    module = build()
    fitted(make, module)
    return fitted(make, module)


@scenario
def validate_first(make: Make, folder: Path) -> Facts:
    module, trainer = build(), make()
    found = trainer.validate(module, loader(10, seed=2), verbose=False)
    trainer.fit(module, loader(), loader(10, seed=2))
    again = trainer.validate(module, loader(10, seed=2), verbose=False)
    return {**facts_of(trainer, module), "found": found, "again": again}


@scenario
def predicted_after_fit(make: Make, folder: Path) -> Facts:
    module, trainer = build(), make()
    trainer.fit(module, loader())
    return {"zero found": trainer.predict(module, loader(10)), **facts_of(trainer, module)}


@scenario
def sync_batchnorm_without_any(make: Make, folder: Path) -> Facts:
    return fitted(make, sync_batchnorm=True)


@scenario
def unknown_checkpoint(make: Make, folder: Path) -> Facts:
    with caught(FileNotFoundError) as names:
        make().fit(build(), loader(), ckpt_path=str(folder / "nowhere.ckpt"))
    return {"names": names}


@scenario
def seed_everything(make: Make, folder: Path) -> Facts:
    pl.seed_everything(5, workers=True)
    return fitted(make, train=loader(shuffle=True))
