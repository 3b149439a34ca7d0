"""Forked programs behave as new interpreters do: arguments, exit codes, output, and their end with all they started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.interpreter import Program, run


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; print(sys.argv)", (0, "['-c', 'a']\n", "")),
        ("raise SystemExit(3)", (3, "", "")),
        ("raise SystemExit('gone')", (1, "", "gone\n")),
        ("import atexit, sys; atexit.register(print, 'last'); sys.exit()", (0, "last\n", "")),
        ("import os; os.kill(os.getpid(), 15)", (-15, "", "")),
        ("import __main__; x = 1; print(__main__.x, hasattr(__main__, '__file__'))", (0, "1 False\n", "")),
    ],
)
def test_code(code: str, expected: tuple[int, str, str], tmp_path: Path) -> None:
    ended = run("-c", code, "a", cwd=tmp_path, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == expected


def test_a_script_knows_its_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def fail(): raise KeyError('here')\n")
    (tmp_path / "script.py").write_text("import os, beside\nprint(__name__, os.getcwd(), flush=True)\nbeside.fail()\n")
    ended = run(str(tmp_path / "script.py"), cwd="/", timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "__main__ /\n")
    assert 'script.py", line 3, in <module>' in ended.stderr


def test_what_takes_too_long_is_killed_with_what_it_started() -> None:
    sleeping = "import time; print(1, flush=True); time.sleep(100)"
    program = Program("-c", f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {sleeping!r}])")
    assert next(program.lines(60)) == "1"
    with pytest.raises(TimeoutError, match="the program has not ended"):
        program.outcome(0.5)
    assert not program.running
