"""`gpp-init` writes a project that trains, is planned and passes its own test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightning_gpp.cli.init import create
from lightning_gpp.errors import ConfigError
from tests.cli.commands import command, launched
from tests.interpreter import Program


def test_the_project_trains_and_passes_its_test(tmp_path: Path) -> None:
    result = command("init", "my_project", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (line,) = re.findall(r"cd my_project && gpp-train (.*)", result.stdout)
    project = tmp_path / "my_project"
    short = ("trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1")
    trained = launched(2, "train", *line.split(), *short, cwd=project)
    assert trained.returncode == 0, trained.stderr
    checkpoint = next((project / "runs" / "my_project").glob("*/checkpoints/last.ckpt"))
    told = ("task=predict", f"ckpt_path={checkpoint}", "hydra.run.dir=told", "trainer.limit_predict_batches=2")
    predicted = launched(2, "train", *line.split(), *told, cwd=project)
    assert predicted.returncode == 0, predicted.stderr
    assert [len(each) for each in torch.load(project / "told" / "predictions_0.pt")] == [64, 64]
    code, output = Program("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project).outcome(60)
    assert code == 0, output


def test_nothing_of_the_copied_name_is_left(tmp_path: Path) -> None:
    project = create("mine", tmp_path)
    files = [path for path in project.rglob("*") if path.is_file()]
    assert {path.relative_to(project).parts[0] for path in files} >= {"mine", "configs", "tests", "train.sbatch"}
    assert not [path for path in files if "starter" in str(path.relative_to(project)) or "starter" in path.read_text()]


@pytest.mark.parametrize("name", ["my-project", "class", "json", "../mine", "", "n\u00fctzlich"])
def test_a_name_that_no_package_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a Python package"):
        create(name, tmp_path)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="mine exists already"):
        create("mine", tmp_path)
