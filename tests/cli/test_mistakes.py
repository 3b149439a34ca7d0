"""Mistakes on the command line end with one sentence about the key and the remedy, and without a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_gpp
from lightning_gpp.cli.app import in_order
from tests.cli.commands import ROOT, command, commands

pytestmark = pytest.mark.timeout(180)  # dozens of commands run in one fixture

PROJECT = {
    "mine.py": "class Model: pass\n",
    "needy.py": "import a_package_that_is_missing\n",
    "broken.py": "x = = 3\n",
    "failing.py": "import torch\nraise OSError('no such device')\n",
    "deep/__init__.py": "",
    "deep/needy.py": "from sklearn.nowhere import nothing\n",
    "latin.yaml": "name: M\xfcller\n",
    "mine/cluster/latin.yaml": "name: M\xfcller\n",
    "mine/cluster/misspelt.yaml": "nodez: []\n",
    "tab.yaml": "nodes: [a: b\n  c\n",
    "own.py": """
import torch
from gpp_examples.two_tower import *
class Model(TwoTower):
    def __init__(self, kind, **given):
        super().__init__(**given); self.kind = kind
    def training_step(self, batch, batch_idx):
        if self.kind == "broken": raise RuntimeError("my step is broken")
        loss = super().training_step(batch, batch_idx)
        return {
            "vector": loss.expand(len(batch[0])), "float": 0.5, "unnamed": {"lss": loss}, "detached": loss.detach(),
        }[self.kind]
    def validation_step(self, batch, batch_idx):
        return batch["nothing"]
""",
    "empty.yaml": "",
}

TWO_TOWER = "experiment=two_tower"
OWN = (TWO_TOWER, "model._target_=own.Model")

MISTAKES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "no experiment": ("train", ("experiment=two_towers",), r"(?s)Could not find 'experiment/two_towers'.*two_tower"),
    "devices in words": (
        "train",
        (TWO_TOWER, "trainer.devices=two"),
        r"Lightning refuses .*trainer\.devices=two.*int > 0",
    ),
    "key": (
        "plan",
        (TWO_TOWER, "strategy.num_microbatches=4"),
        r"There is no key 'strategy\.num_microbatches'\. Did you mean strategy\.num_micro_batches",
    ),
    "argument that the file leaves out": (
        "plan",
        (TWO_TOWER, "trainer.gradient_clip_algorithm=value"),
        r"If lightning\.Trainer takes it, write \+trainer\.gradient_clip_algorithm=VALUE",
    ),
    "stage as a string": (
        "plan",
        (TWO_TOWER, "+strategy.stages={head: '0'}"),
        r"strategy\.stages\.head is '0', a str",
    ),
    "no module": (
        "train",
        (TWO_TOWER, "model._target_=nowhere.Model"),
        r"_target_=nowhere\.Model cannot be imported",
    ),
    "no name": ("train", (TWO_TOWER, "model._target_=3"), r"model \(3\) does not work .*Expected a callable target"),
    "package": (
        "train",
        (TWO_TOWER, "model._target_=needy.M"),
        "cannot be imported: .*No module named 'a_package_that_is_missing'",
    ),
    "extra": (
        "plan",
        (TWO_TOWER, "model._target_=deep.needy.M"),
        r'pip install "lightning-gpp\[examples\]", or',
    ),
    "syntax": (
        "train",
        (TWO_TOWER, "model._target_=broken.M"),
        r"\(?broken.M\)? .*invalid syntax",
    ),
    "checkpoint": (
        "train",
        (TWO_TOWER, "ckpt_path=none.ckpt"),
        r"ckpt_path=none\.ckpt does not exist\. Give",
    ),
    "run folder": ("train", (TWO_TOWER, "hydra.run.dir=mine.py/runs"), r"mine\.py/runs.*: .*hydra\.run\.dir=FOLDER"),
    "junk": ("train", ("junk",), r"'junk' is not KEY=VALUE, for example trainer\.devices=4\. --help"),
    "output below a file": (
        "plan",
        (TWO_TOWER, "output=mine.py/plan.yaml"),
        r"output=mine\.py/plan\.yaml cannot be",
    ),
    "no plan": (
        "plan",
        (TWO_TOWER, "strategy.plan=no.yaml"),
        r"no\.yaml \(strategy\.plan\): cannot be read: No",
    ),
    "no cluster": (
        "plan",
        (TWO_TOWER, "strategy.cluster=no.yaml"),
        r"strategy\.cluster=no\.yaml: cannot be read: No",
    ),
    "graph": ("plan", ("graph=deep", "cluster=summit", "batch_size=8"), "graph=deep: cannot be read: Is a directory"),
    "loss of every sample": (
        "plan",
        (*OWN, "+model.kind=vector"),
        r"a tensor of shape \(4,\) for 4 samples\.",
    ),
    "broken step": (
        "plan",
        (*OWN, "+model.kind=broken"),
        r"own\.py:\d+.*: RuntimeError: my step is broken",
    ),
    "key that another value refers to": (
        "plan",
        (TWO_TOWER, "+count=none", "trainer.devices=${count}"),
        r"trainer\.devices=none must be a whole number",
    ),
    "no node": (
        "plan",
        (TWO_TOWER, "trainer.num_nodes=0"),
        r"trainer\.num_nodes=0 must be a whole number of",
    ),
    "encoded group": (
        "plan",
        (TWO_TOWER, "cluster=latin", "--config-dir", "mine"),
        r"cluster/latin\.yaml is not text",
    ),
    "initials": ("plan", (TWO_TOWER, "model.lr=1"), r"no key 'model\.lr'\. Did you mean model\.learning_rate\?"),
    "option": (
        "plan",
        (TWO_TOWER, "strategy.num_pipelines=0"),
        r"strategy\.num_pipelines is 0; it must be a wh",
    ),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text, encoding="latin-1")
    return folder


@pytest.fixture(scope="module", params=["train", "plan"])
def results(project: Path, request: pytest.FixtureRequest) -> dict[str, tuple[int, str, str]]:
    """The return code, the errors and the expected message of every case of a command."""
    wanted = {case: mistake for case, mistake in MISTAKES.items() if mistake[0] == request.param}
    ran = commands([(name, *arguments) for name, arguments, _ in wanted.values()], cwd=project, timeout=170)
    return {
        case: (code, error, mistake[2]) for (case, mistake), (code, _, error) in zip(wanted.items(), ran, strict=True)
    }


def test_mistakes_are_told_without_a_traceback(results: dict[str, tuple[int, str, str]]) -> None:
    told = {
        case: code in (1, 2) and "Traceback" not in error and re.search(expected, " ".join(error.split()))
        for case, (code, error, expected) in results.items()
    }
    assert all(told.values()), {case: results[case] for case, is_told in told.items() if not is_told}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpus_on_a_machine_without(project: Path) -> None:
    ((code, _, error),) = commands([("train", TWO_TOWER, "trainer=gpu")], cwd=project)
    assert code == 1
    assert re.match(r"gpp-train: Lightning refuses trainer.accelerator=gpu, .*gpu backend.* trainer=cpu", error)


def test_a_failed_plan_leaves_no_empty_file(project: Path) -> None:
    line = ("plan", "graph=mine.py", "cluster=summit", "batch_size=8", "output=new.yaml")
    ((code, _, _),) = commands([line], cwd=project)
    assert code == 1
    assert not (project / "new.yaml").exists()


def test_a_plan_leaves_the_file_that_it_is_asked_for(tmp_path: Path) -> None:
    limits = ("strategy.search_seconds=1",)
    assert command("plan", TWO_TOWER, *limits, "output=plan.yaml", cwd=tmp_path).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_options_may_stand_anywhere() -> None:
    given = ["compare=true", "--config-dir", "mine", "experiment=x", "-m", "model.lr=1,2", "~data"]
    assert in_order(given) == ["--config-dir", "mine", "-m", "compare=true", "experiment=x", "model.lr=1,2", "~data"]


@pytest.mark.parametrize("name", ["train", "plan", "checkpoint", "init"])
def test_the_version_is_that_of_the_package(name: str, tmp_path: Path) -> None:
    assert command(name, "--version", cwd=tmp_path).stdout == f"lightning-gpp {lightning_gpp.__version__}\n"


@pytest.mark.parametrize(("name", "key"), [("train", "ckpt_path=null"), ("plan", "output=null")])
@pytest.mark.parametrize("arguments", [(), ("--help",), (TWO_TOWER, "-h")])
def test_help(name: str, key: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = command(name, *arguments, cwd=tmp_path, COLUMNS="80")
    assert (result.returncode, result.stderr) == (0, "")
    for part in (f"Usage: gpp-{name} ", f"gpp-{name} {TWO_TOWER}", "  cluster\n      cpu_host, ", f"  {key}\n"):
        assert part in result.stdout
    assert "  strategy.search_seconds=40.0\n      time limit of the partitioner's search" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert not list(tmp_path.iterdir())


def test_an_installed_command_finds_modules_of_the_current_folder(project: Path, tmp_path: Path) -> None:
    """Python puts the folder of the command's script in front of the module path, not the current one."""
    (tmp_path / "script.py").write_text("from lightning_gpp.cli.plan import main; main()")
    result = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), TWO_TOWER, "model._target_=mine.Nothing"],
        cwd=project,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "'Nothing' is importable from module 'mine'" in result.stderr
