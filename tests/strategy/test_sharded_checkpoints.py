"""Sharded checkpoints: every rank writes what it holds, and any other plan, number of devices or sharding reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_gpp.checkpoints.convert import convert, ordinary
from tests.checkpoints.differences import differences
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader
from tests.strategy.test_training import EXACT, plain

THREE = [
    {"modules": ["left"], "devices": [2]},
    {"modules": ["right"], "devices": [1]},
    {"modules": ["head", "@step"], "devices": [0]},
]
MANY = dict.fromkeys(["left", "right", "head", "@step"], 0)


class SaveAtStart(Callback):
    """Saves a run as it was resumed, before its first step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def fit(
    rank: int, folder: str, settings: dict[str, Any], source: str | None = None, kind: type[TwoTowers] = TwoTowers
) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module, devices = kind().double(), settings.pop("processes", 2)
    epochs = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    strategy = harness.strategy(**{"state_dict_type": "sharded", **settings}) if settings else "auto"
    callbacks = [epochs, SaveAtStart(f"{folder}/start.ckpt")]
    trainer = harness.trainer(strategy, devices, max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, loader(24), ckpt_path=source)
    return {
        "losses": module.losses,
        "metrics": module.metrics,
        "complete": not any(p.is_meta for p in module.parameters()),
    }


CHAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "three": (3, {"stages": THREE, "async_save": True}),
    "zero1": (4, {"stages": harness.STAGES, "num_pipelines": 2, "sharding": "zero1"}),
    "fsdp": (3, {"stages": MANY, "num_pipelines": 3, "sharding": "fsdp"}),
    "back": (2, {"stages": harness.STAGES}),
}
"""Each run resumes from the state with which the run before has begun."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    found = {"first": harness.run(2, fit, f"{folder}/first", {"stages": harness.STAGES})[0]}
    source = f"{folder}/first/epoch=0.ckpt"
    for name, (processes, settings) in CHAIN.items():
        given = {**settings, "processes": processes}
        found[name] = harness.run(processes, fit, f"{folder}/{name}", given, source)[0]
        source = f"{folder}/{name}/start.ckpt"
    return folder, found


def test_states_are_the_same_to_the_last_bit_on_any_ranks(runs: Any) -> None:
    folder, _ = runs
    first = ordinary(folder / "first/epoch=0.ckpt")
    assert len(first["optimizer_states"][0]["state"]) == 8
    for name in CHAIN:
        resumed = ordinary(folder / name / "start.ckpt")
        assert list(resumed["state_dict"]) == list(first["state_dict"])
        for key in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert not list(differences(resumed[key], first[key])), name


def test_a_resumed_run_gives_the_same_losses(runs: Any) -> None:
    _, found = runs
    rest = found["first"]["losses"][3:]
    assert found["back"]["losses"] == rest
    assert found["three"]["losses"] == pytest.approx(rest, **EXACT)
    assert found["three"]["metrics"][-1] == pytest.approx(found["first"]["metrics"][-1], **EXACT)


def test_every_rank_writes_its_own_part_once(runs: Any) -> None:
    folder, _ = runs
    sizes = {name: sum(f.stat().st_size for f in (folder / name / "start.ckpt").glob("*.distcp")) for name in CHAIN}
    values = sum(v.nbytes for v in ordinary(folder / "back/start.ckpt")["state_dict"].values())
    assert all(len(list((folder / name / "start.ckpt").glob("*.distcp"))) == n for name, (n, _) in CHAIN.items())
    assert max(sizes["zero1"], sizes["three"]) < 1.2 * sizes["back"], "replicas write once"
    assert values * 3 < sizes["back"]


def test_plain_lightning_resumes_a_converted_folder_and_the_pipeline_its_file(runs: Any, tmp_path: Path) -> None:
    folder, found = runs
    convert(folder / "fsdp/start.ckpt", tmp_path / "plain.ckpt")
    first = ordinary(folder / "first/epoch=0.ckpt")
    alone = plain(fit, 0, f"{tmp_path}/alone", {"processes": 1}, f"{tmp_path}/plain.ckpt")
    assert alone["losses"] == pytest.approx(found["first"]["losses"][3:], **EXACT)
    assert not list(differences(ordinary(tmp_path / "alone/start.ckpt")["state_dict"], first["state_dict"]))
    (again, _) = harness.run(2, fit, f"{tmp_path}/again", {"stages": harness.STAGES}, f"{tmp_path}/alone/start.ckpt")
    assert again["losses"] == found["first"]["losses"][3:]


def save_after_validation(rank: int, folder: str) -> None:
    """Fits, validates, and saves both kinds; the validation places a buffer that it does not use elsewhere."""
    pl.seed_everything(5, verbose=False)
    for kind in ("full", "sharded"):
        trainer = harness.trainer(harness.strategy(state_dict_type=kind), 2, max_epochs=1)
        module = harness.make_module()
        trainer.fit(module, loader(16))
        trainer.save_checkpoint(f"{folder}/{kind}_fitted.ckpt")
        trainer.validate(module, loader(16), verbose=False)
        trainer.save_checkpoint(f"{folder}/{kind}_validated.ckpt")


def test_a_checkpoint_after_a_validation_has_the_optimizers_of_the_training(tmp_path: Path) -> None:
    harness.run(2, save_after_validation, str(tmp_path))
    for kind in ("full", "sharded"):
        fitted, validated = (ordinary(tmp_path / f"{kind}_{name}.ckpt") for name in ("fitted", "validated"))
        assert fitted["optimizer_states"][0]["state"]
        for entry in ("state_dict", "optimizer_states", "gpp"):
            assert not list(differences(fitted[entry], validated[entry])), (kind, entry)
