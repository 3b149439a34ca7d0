"""A run goes on with other numbers of processes: it plans for what there is, and keeps mini-batches and losses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import pytest

from tests.failure import elastic
from tests.failure.pipeline_rank import free_port, processes_running
from tests.failure.program import Numbers, as_torchrun_would
from tests.interpreter import PATH

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


STEPS = 100


class Nodes:
    """Agents of torchrun that stand for nodes of `each` processes, at most `most` at a time."""

    def __init__(self, folder: Path, most: int, each: int) -> None:
        self.folder, self.agents, self.most, self.each = folder, list[subprocess.Popen[bytes]](), most, each
        self._endpoint = f"127.0.0.1:{free_port()}"

    def start(self) -> None:
        limits = f"--nnodes={self.most - 1}:{self.most}", f"--nproc-per-node={self.each}", "--max-restarts=3"
        meeting = "--rdzv-backend=c10d", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=elastic"
        settings = f"--rdzv-conf=keep_alive_interval=3,is_host={not self.agents}"
        with (self.folder / f"node{len(self.agents)}.txt").open("w") as log:
            arguments = "-m", "torch.distributed.run", *limits, *meeting, settings, "-m", "tests.failure.elastic"
            given = {"PYTHONPATH": PATH, "STEP_SECONDS": "0.3", "STEPS": str(STEPS), "OMP_NUM_THREADS": "1"}
            environment = {**os.environ, **given, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            command = (sys.executable, *arguments)
            agent = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        self.agents.append(agent)

    def lose(self, number: int) -> None:
        """As if the power of the node failed."""
        pid = self.agents[number].pid
        for each in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
            os.kill(each, signal.SIGKILL)

    def trained(self) -> list[tuple[int, float, int, float]]:
        """Step, loss, number of processes, and time of every step."""
        lines = [
            line.split()
            for log in self.folder.glob("*.txt")
            for line in re.findall("^trained .*", log.read_text(), re.M)
        ]
        found = [(int(step), float.fromhex(loss), int(number), float(at)) for _, step, loss, number, at in lines]
        return sorted(found, key=lambda each: each[3])

    def seconds_until(self, there: Callable[[int, float], bool], steps: int = 1) -> float:
        """Seconds until so many steps were trained by processes of that number, after that time."""
        began = time.time()
        while len(found := [each for each in self.trained() if there(each[2], each[3])]) < steps:
            assert time.time() - began < 300, [log.read_text() for log in self.folder.glob("*.txt")]
            time.sleep(0.2)
        return found[0][3] - began


@contextmanager
def nodes(folder: Path, most: int, each: int) -> Iterator[Nodes]:
    job = Nodes(folder, most, each)
    try:
        for _ in range(most):
            job.start()
        yield job
    finally:
        for agent in job.agents:
            agent.terminate()
        for agent in job.agents:
            agent.wait(60)


@pytest.mark.timeout(1500)
@pytest.mark.acceptance
@pytest.mark.parametrize(("num_nodes", "each"), [(3, 1), (4, 2)])
def test_a_node_is_lost_and_one_comes(tmp_path: Path, num_nodes: int, each: int) -> None:
    """torchrun starts processes again, which plan for what there is, and go on."""
    most, fewer = num_nodes * each, (num_nodes - 1) * each
    with nodes(tmp_path, num_nodes, each) as job:
        job.seconds_until(lambda number, _: number == most, steps=12)
        lost = time.time()
        job.lose(num_nodes - 1)
        print(f"goes on {job.seconds_until(lambda number, _: number == fewer):.0f} s after a node was lost")
        job.seconds_until(lambda number, _: number == fewer, steps=8)
        job.start()
        print(f"goes on {job.seconds_until(lambda number, at: number == most and at > lost + 5):.0f} s after one came")
        assert [agent.wait(300) for agent in job.agents[: num_nodes - 1]] == [0] * (num_nodes - 1)
        done = job.trained()
    assert {step for step, *_ in done} == set(range(1, STEPS + 1))
    expected = undivided(STEPS)
    for step, loss, *_ in done:
        assert loss == pytest.approx(expected[step - 1], rel=1e-10)


def undivided(steps: int) -> list[float]:
    """The losses of one process without a Trainer."""
    module = elastic.Module()
    optimizer = module.configure_optimizers()
    losses = []
    for batch in islice(chain.from_iterable(repeat(Numbers())), steps):
        optimizer.zero_grad()
        loss = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
