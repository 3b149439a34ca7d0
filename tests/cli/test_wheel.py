"""The wheel holds all that the commands need: built here, installed into an empty folder, run from another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.commands import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=50)
    return next(folder.glob("lightning_gpp-*.whl"))


def test_the_wheel_holds_configs_examples_and_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    assert names >= {f"lightning_gpp/{path}" for path in configs}
    assert names >= {"lightning_gpp/py.typed", "gpp_examples/two_tower.py", "lightning_gpp/starter/train.sbatch"}
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_its_readme_has_no_links_that_lead_nowhere(wheel: Path) -> None:
    """Whoever sees it on PyPI has no folder that a relative link or picture could lead to."""
    contents = zipfile.ZipFile(wheel)
    (name,) = (name for name in contents.namelist() if name.endswith(".dist-info/METADATA"))
    text = contents.read(name).decode()
    assert "Graph pipeline parallelism for [PyTorch Lightning](https://" in text
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", text)


def test_the_installed_command_composes_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    zipfile.ZipFile(wheel).extractall(packages)
    code = "import sys; from lightning_gpp.cli.train import main; sys.argv[1:] = sys.argv[1:]; main()"
    arguments = ["experiment=two_tower", "--cfg", "job", "--package", "strategy"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "schedule: null" in result.stdout, result.stderr
