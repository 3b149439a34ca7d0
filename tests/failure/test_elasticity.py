"""A run goes on with other numbers of processes: it plans for what there is, and keeps mini-batches and losses."""

from __future__ import annotations

import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.failure.pipeline_rank import processes_running
from tests.failure.program import as_torchrun_would

USR1 = signal.SIGUSR1
ValuesByStep = dict[tuple[str, ...], list[float]]


def run(folder: Path, world_size: int, *asked: Any) -> ValuesByStep:
    """Train on from the newest checkpoint; the values that rank 0 printed, by what they are."""
    with processes_running(folder, world_size, as_torchrun_would, str(folder), asked, {}) as running:
        running.wait(120)
    expected = 128 + asked[1] if asked else 0
    assert running.codes == [expected] * world_size, running.output()
    return values(running.output(0))


def values(output: str) -> ValuesByStep:
    found: ValuesByStep = {}
    for line in re.findall("^(?:trained|validated) .*$", output, re.MULTILINE):
        numbers = re.findall(r"-?0x[\w.+-]+", line)
        found[tuple(re.sub(r"-?0x[\w.+-]+", "", line).split())] = [float.fromhex(number) for number in numbers]
    return found


def assert_close(actual: ValuesByStep, expected: ValuesByStep) -> None:
    assert list(actual) == list(expected)
    for key, numbers in expected.items():
        assert actual[key] == pytest.approx(numbers, rel=1e-12, abs=1e-12), key


@pytest.mark.timeout(500)
@pytest.mark.acceptance
def test_four_then_two_then_four_processes(tmp_path: Path) -> None:
    """Stages have more replicas on more processes."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = run(Path(folder), 4)
    run(tmp_path, 4, 1, USR1, "step 4")
    run(tmp_path, 2, 0, USR1, "step 9")
    assert_close(run(tmp_path, 4), undisturbed)
