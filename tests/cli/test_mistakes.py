"""Mistakes on the command line end with one paragraph about the key and the remedy, and without a traceback."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import lightning_gpp
from lightning_gpp.cli.app import in_order
from tests.cli.commands import called, command
from tests.distributed import PATIENCE
from tests.interpreter import Program

PROJECT = {
    "mine.py": "class Model: pass\n",
    "needy.py": "import a_package_that_is_missing\n",
    "mine/experiment/broken.yaml": "# @package _global_\ndefaults: [\n",
    "mine/experiment/headless.yaml": "defaults:\n  - override /model: two_tower\n",
    "own.py": """
from gpp_examples.two_tower import *
class Model(TwoTower):
    def training_step(self, batch, batch_idx): raise RuntimeError("my step is broken")
""",
}

TWO_TOWER = "experiment=two_tower"

MISTAKES: dict[str, tuple[str, ...]] = {
    r"gpp-train: experiment=two_towers: .*Did you mean two_tower": ("train", "experiment=two_towers"),
    r"trainer .*int > 0.*devices=two": ("train", TWO_TOWER, "trainer.devices=two"),
    r"strategy\.num_microbatches: there is no such key\. Did you mean strategy\.num_micro_batches": (
        *("plan", TWO_TOWER, "strategy.num_microbatches=4"),
    ),
    r"model\.learnin_rate: there is no such key\. Did you mean model\.learning_rate": (
        *("plan", TWO_TOWER, "model.learnin_rate=0.1"),
    ),
    r"strategy=fspd: there is no such file.* There are: chain, ddp": ("plan", TWO_TOWER, "strategy=fspd"),
    r"'trainer\.devices' cannot be read\. A setting is KEY=VALUE without spaces": (
        *("plan", TWO_TOWER, "trainer.devices", "2"),
    ),
    r"No model is chosen: .* experimnt: did you mean experiment\?": ("plan", "experimnt=two_tower"),
    r"trainer\.strategy: there is no such key\. Did you mean strategy=\.\.\.\?": (
        *("plan", TWO_TOWER, "trainer.strategy=ddp"),
    ),
    r"No strategy is chosen|chooses no strategy": ("train", TWO_TOWER, "~strategy"),
    r"strategy=null names no file of the group: give one": ("train", TWO_TOWER, "strategy=null"),
    r"refers to data\.context, and data has no such key": ("train", TWO_TOWER, "model=gpt_text"),
    r"trainer\.max_epochs=ten is a text; it must be a whole number, or null": (
        *("train", TWO_TOWER, "trainer.max_epochs=ten"),
    ),
    r"The experiment chooses no model\. Begin its file with the line": (
        *("train", "--config-dir", "mine", "experiment=headless"),
    ),
    r"takes a plus: \+trainer\.gradient_clip_algorithm=": (
        *("plan", TWO_TOWER, "trainer.gradient_clip_algorithm=value"),
    ),
    r"nowhere\.Model.* cannot be built: .*No module named 'nowhere'": (
        "train",
        TWO_TOWER,
        "model._target_=nowhere.Model",
    ),
    r"needy\.M.* cannot be built: .*No module named 'a_package_that_is_missing'": (
        "train",
        TWO_TOWER,
        "model._target_=needy.M",
    ),
    r"ckpt_path=none\.ckpt does not exist\. Give": ("train", TWO_TOWER, "ckpt_path=none.ckpt"),
    r"task=evaluate does not exist\. Did you mean validate\?": ("train", TWO_TOWER, "task=evaluate"),
    r"Lightning refuses seed=-1: ": ("train", TWO_TOWER, "seed=-1"),
    r"is not YAML: .*broken\.yaml": ("train", "--config-dir", "mine", "experiment=broken"),
    r"output=mine\.py/plan\.yaml cannot be": ("plan", TWO_TOWER, "output=mine.py/plan.yaml"),
    r"no\.yaml \(strategy\.plan\): cannot be read: No": ("plan", TWO_TOWER, "strategy.plan=no.yaml"),
    r"own\.py:\d+.*: RuntimeError: my step is broken": (*("plan", TWO_TOWER, "model._target_=own.Model"),),
    r"strategy\.num_pipelines is 0; it must be greater": ("plan", TWO_TOWER, "strategy.num_pipelines=0"),
    r"cluster: .*Did you mean strategy\.cluster\?": ("train", TWO_TOWER, "cluster=dgx_h100"),
    r"num_micro_batches: .*Did you mean strategy\.num_micro_batches\? ": ("train", TWO_TOWER, "num_micro_batches=4"),
    r"trainer\.devices: .*'SLURM_NTASKS_PER_NODE' not found.*srun": ("plan", TWO_TOWER, "trainer=slurm"),
    r"'fp16' is invalid.*Its settings are precision=fp16\.": ("train", TWO_TOWER, "trainer.precision=fp16"),
    r"sharding='fsdp' does not .*Use strategy\.sharding=zero1\.": (
        *("plan", TWO_TOWER, "strategy.cuda_graphs=true", "strategy.sharding=fsdp"),
    ),
}
"""What is said, by the command line."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_told_without_a_traceback(
    said: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = MISTAKES[said]
    assert called(monkeypatch, name, *arguments, "hydra/job_logging=none", "hydra.output_subdir=null", cwd=project) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert re.search(said, " ".join(told.split())), told


def test_a_plan_leaves_the_file_that_it_is_asked_for(tmp_path: Path) -> None:
    assert command("plan", TWO_TOWER, "strategy.search_seconds=0.5", "output=plan.yaml", cwd=tmp_path).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]
    line = ("plan", TWO_TOWER, "strategy.plan=no.yaml", "output=new.yaml")
    assert command(*line, cwd=tmp_path).returncode == 1
    assert not (tmp_path / "new.yaml").exists()


def test_options_may_stand_anywhere() -> None:
    given = ["compare=true", "--config-dir", "mine", "experiment=x", "-m", "model.lr=1,2", "~data"]
    assert in_order(given) == ["--config-dir", "mine", "-m", "compare=true", "experiment=x", "model.lr=1,2", "~data"]


@pytest.mark.parametrize("name", ["train", "plan", "checkpoint", "init"])
def test_the_version_is_that_of_the_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, name, "--version", cwd=tmp_path) == 0
    assert capsys.readouterr().out == f"lightning-gpp {lightning_gpp.__version__}\n"


@pytest.mark.parametrize(("name", "key"), [("train", "ckpt_path=null"), ("plan", "output=null")])
def test_help(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert called(monkeypatch, name, TWO_TOWER, "-h", cwd=tmp_path) == 0
    shown = capsys.readouterr().out
    for part in (f"Usage: gpp-{name} ", f"gpp-{name} {TWO_TOWER}", "  cluster\n      cpu_host, ", f"  {key}\n"):
        assert part in shown
    assert "  strategy.search_seconds=" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["--help", f"{TWO_TOWER} strategy.search_seconds=0.1 output=plan.yaml"])
def test_a_reader_may_stop_reading(line: str, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    errors.touch()
    program = Program("-m", "lightning_gpp.cli.plan", *line.split(), cwd=tmp_path, errors=str(errors))
    program.abandoned(PATIENCE)
    assert errors.read_text() == ""
    assert (tmp_path / "plan.yaml").exists() == ("output=" in line)


def test_an_installed_command_finds_modules_of_the_current_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python puts the folder of the command's script in front of the module path, not the current one."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder and Path(folder) != project])
    sys.modules.pop("mine", None)
    line = (TWO_TOWER, "model._target_=mine.Nothing", "hydra/job_logging=none", "hydra.output_subdir=null")
    assert called(monkeypatch, "plan", *line, cwd=project) == 1
    assert "'Nothing' is importable from module 'mine'" in " ".join(capsys.readouterr().err.split())
    del sys.modules["mine"]  # another test makes a project of this name
