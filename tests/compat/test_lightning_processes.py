"""Private names of Lightning around processes do what the library needs of them. Processes are real ones."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpp._compat import lightning_processes as compat
from tests.interpreter import Program

LAUNCHED = """
import os, pathlib, sys

if "LOCAL_RANK" in os.environ:
    pathlib.Path(sys.argv[1]).write_text(f"{os.environ['LOCAL_RANK']} {os.environ['GPP_LAUNCHER_PID']}")
else:
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning_gpp._compat.lightning_processes import LAUNCHER, ScriptLauncher

    launcher = ScriptLauncher(LightningEnvironment(), 2, 1)
    launcher.launch(lambda: [process.wait() for process in launcher.procs])
    print(os.getpid())
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """Local rank and parent that the second process found; process id of the first."""
    folder = tmp_path_factory.mktemp("launched")
    script, note = folder / "script.py", folder / "note"
    script.write_text(LAUNCHED)
    code, output = Program(str(script), str(note)).outcome(50)
    assert code == 0, output
    return note.read_text().split(), output.strip()


def test_script_launcher(launched: tuple[list[str], str]) -> None:
    (local_rank, _), _ = launched
    assert local_rank == "1"


def test_forking_launcher() -> None:
    strategy: Any = None
    assert compat.ForkingLauncher(strategy, start_method="fork").is_interactive_compatible


def test_launcher(launched: tuple[list[str], str]) -> None:
    (_, parent), process_id = launched
    assert parent == process_id
