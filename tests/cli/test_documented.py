"""Every command of README and docs is run: here in a folder of a user, or by another test."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from lightning_gpp.cli.plan import overrides
from tests.cli.commands import ROOT, check_targets, command, composed
from tests.cli.documented import COMMANDS, ELSEWHERE, PAGES, Documented, further

HERE = [item for item in COMMANDS if not ELSEWHERE.match(item.text)]
INVENTED = re.compile(r"runs/two_tower/2026-01-01_12-00-00|(?<![\w./])last\.ckpt")
"""Names of folders that a reader has others for."""


COMPOSED = [
    item
    for item in COMMANDS
    if re.match("gpp-(train|plan)", item.text) and not re.search("--config-dir|--multirun|=my_project", item.text)
]


@pytest.mark.parametrize("text", sorted({item.text for item in COMPOSED}))
def test_configurations_compose_and_name_what_exists(text: str) -> None:
    name, *arguments = Documented("", text).words
    config = composed(*overrides(arguments), name=name.removeprefix("gpp-"))
    check_targets(config)


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", sorted({item.page for item in HERE}))
def test_every_command_of_a_page_runs(page: str, tmp_path: Path) -> None:
    folder = tmp_path
    prepare(ROOT / page, folder)
    for item in (item for item in HERE if item.page == page):
        folder = run(item, folder)


def prepare(page: Path, folder: Path) -> None:
    """Files that a page takes for granted."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for group in ("data", "model", "experiment"):
        (folder / "mine" / group).mkdir(parents=True)
        shutil.copy(ROOT / "configs" / group / "two_tower.yaml", folder / "mine" / group / "mine.yaml")
    experiment = folder / "mine" / "experiment" / "mine.yaml"
    experiment.write_text(experiment.read_text().replace(": two_tower", ": mine"))
    for block in blocks:
        if name := re.match(r"# ([\w.]+\.yaml)$", block.partition("\n")[0]):
            (folder / name[1]).write_text(block)


def run(item: Documented, folder: Path) -> Path:
    """Run a command in a folder; returns the folder of the next one."""
    words = [*item.words, *further(item)]
    print(item.text, flush=True)
    if words[0] == "cd":
        return folder / words[1]
    name, *arguments = [INVENTED.sub(lambda found: newest(found[0], folder), word) for word in words]
    ended = command(name.removeprefix("gpp-"), *arguments, cwd=folder, timeout=900)
    assert ended.returncode == 0, f"{item.text}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    assert "Traceback" not in ended.stderr, ended.stderr
    return folder


def newest(name: str, folder: Path) -> str:
    """The run folder, or the checkpoint, of the latest run."""
    complete = (path for path in (folder / "runs" / "two_tower").iterdir() if (path / "checkpoints/last.ckpt").exists())
    latest = max(complete, key=lambda path: path.stat().st_mtime)
    return str(latest / "checkpoints" / name if name.endswith(".ckpt") else latest)


def test_pages_are_found() -> None:
    assert {path.name for path in PAGES} >= {"README.md", "commands.md", "gpu.md"}
