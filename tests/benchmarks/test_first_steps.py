"""The first steps of README: from a clone to the demo's picture, and from a wheel to training a module of one's own.

The environment of the tests takes the place of the one that `make` would install from the internet; everything else is
as a new user has it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


def shell(line: str, folder: Path, packages: str) -> str:
    environment = {**os.environ, "PYTHONPATH": packages}
    ran = subprocess.run(
        ["bash", "-ec", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{line}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout + ran.stderr


def environment_for(clone: Path) -> None:
    """What `make` would install: this environment, up to date."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    for name in ("train", "plan"):
        script = clone / ".venv" / "bin" / f"gpp-{name}"
        script.write_text(f"#!{sys.executable}\nfrom lightning_gpp.cli.{name} import main\nmain()\n")
        script.chmod(0o755)
    (clone / ".venv" / "ready").touch()


def test_from_a_clone_to_the_demos_picture_in_two_commands(tmp_path: Path) -> None:
    shell(f"git clone -q {ROOT} lightning-gpp", tmp_path, "")
    clone = tmp_path / "lightning-gpp"
    environment_for(clone)
    told = shell("make demo", clone, f"{clone}:{clone / 'examples'}")
    (folder,) = (clone / "runs" / "two_tower").iterdir()
    assert "<svg" in (folder / "report.html").read_text()
    (accuracy,) = re.findall(r"test/accuracy\W+([\d.]+)", told)
    assert float(accuracy) >= 0.97


def test_from_the_wheel_to_a_module_of_ones_own(tmp_path: Path) -> None:
    """The page is README's block with `gpp-init`, as far as it needs neither a GPU nor SLURM."""
    build = f"{sys.executable} -m hatchling build -t wheel -d {tmp_path}"
    subprocess.run(build.split(), cwd=ROOT, check=True, capture_output=True)
    packages = tmp_path / "packages"
    shell(f"{sys.executable} -m pip install -q --no-deps --target {packages} lightning_gpp-*.whl", tmp_path, "")
    (block,) = re.findall(r"^gpp-init my_project.*\n.*\n", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = re.sub(r"\s#.*", "", block).replace("gpp-", f"{sys.executable} {packages}/bin/gpp-")
    told = shell(commands, tmp_path, str(packages))
    assert list(tmp_path.glob("my_project/runs/my_project/*/checkpoints/last.ckpt")), told
    assert list(tmp_path.glob("my_project/runs/my_project/*/report.html"))
