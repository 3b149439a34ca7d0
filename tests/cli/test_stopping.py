"""Commands whose output ends in a pipe that nobody reads to its end."""

from __future__ import annotations

import os
import subprocess
import sys

PRINTING = """
from lightning_gpp.cli.stopping import pipeable
with pipeable():
    print("line\\n" * {lines})
    {then}
"""


def _into_a_closed_pipe(lines: int, then: str = "") -> subprocess.CompletedProcess[str]:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code = PRINTING.format(lines=lines, then=then)
        return subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)


def test_a_reader_that_has_enough_ends_a_command_without_a_traceback() -> None:
    for lines in (1, 100_000):
        ended = _into_a_closed_pipe(lines)
        assert (ended.returncode, ended.stderr) == (1, "")


def test_another_broken_pipe_is_an_error() -> None:
    code = PRINTING.format(lines=1, then="raise BrokenPipeError('of a worker')")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "BrokenPipeError: of a worker" in ended.stderr
