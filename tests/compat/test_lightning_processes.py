"""Private names of Lightning around processes do what the library needs of them. Processes are real ones."""

from __future__ import annotations

from pathlib import Path

from tests.interpreter import Program

LAUNCHED = """
import os, pathlib, sys

if "LOCAL_RANK" in os.environ:
    pathlib.Path(sys.argv[1]).write_text(os.environ["LOCAL_RANK"])
else:
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning_gpp._compat.lightning_processes import ScriptLauncher

    launcher = ScriptLauncher(LightningEnvironment(), 2, 1)
    launcher.launch(lambda: [process.wait() for process in launcher.procs])
"""


def test_script_launcher(tmp_path: Path) -> None:
    script, note = tmp_path / "script.py", tmp_path / "note"
    script.write_text(LAUNCHED)
    code, output = Program(str(script), str(note)).outcome(50)
    assert code == 0, output
    assert note.read_text() == "1"
