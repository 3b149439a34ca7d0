"""Many runs in one process: fit, validate, fit again, with new trainers and strategies, leave nothing behind."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gpp._compat.torch import FakeTensor, FakeTensorMode
from lightning_gpp.capture import capture_step
from tests.sampling import sample
from tests.strategy import harness
from tests.strategy.test_launch import free_port

SETTINGS: dict[str, dict[str, Any]] = {
    "stages": {},
    "replicas": {"stages": None, "num_pipelines": 2},
    "zero1": {"stages": None, "num_pipelines": 2, "sharding": "zero1"},
    "asynchronous": {"weights": "stash"},
}


def held() -> tuple[int, int, int]:
    """Descriptors, threads, and resident kilobytes of this process."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), int(fields["Threads"]), int(fields["VmRSS"].split()[0])


def cycle(options: dict[str, Any]) -> None:
    """Fit and validate, then fit the same module with a new trainer and strategy, freezing a part of it on the way."""
    module = harness.make_module()
    for frozen in (False, True):
        trainer = harness.trainer(harness.strategy(self_check=False, **options), devices=2, max_epochs=1)
        module.head.requires_grad_(not frozen)
        trainer.fit(module, harness.loader(16))
        trainer.validate(module, harness.loader(16), verbose=False)
    trainer.strategy.barrier()  # as other strategies allow it


def settled(before: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """What is held once connections of the run, which their threads close later, are gone, or a minute later."""
    until = time.monotonic() + 60.0
    while before and any(now > then for now, then in zip(held()[:2], before[:2], strict=True)):
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return held()


def cycles(rank: int, number: int, options: dict[str, Any]) -> list[tuple[int, int, int]]:
    measured: list[tuple[int, int, int]] = []
    for _ in range(number):
        cycle(options)
        measured.append(settled(measured[0] if measured else None))
    return measured


@pytest.mark.parametrize("name", sample(["stages", "zero1"], ["zero1"]))
def test_runs_leave_no_descriptors_or_threads(name: str) -> None:
    for first, second in harness.run(2, cycles, 2, SETTINGS[name]):
        assert all(later <= before for later, before in zip(second[:2], first[:2], strict=True))


def fakes() -> list[Any]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (FakeTensorMode, FakeTensor)]


def test_a_capture_leaves_no_objects() -> None:
    before = {id(each) for each in fakes()}  # of other tests
    for _ in range(2):
        capture_step(harness.make_module(), next(iter(harness.loader())))
    assert not [each for each in fakes() if id(each) not in before]


@pytest.mark.acceptance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETTINGS)
def test_two_hundred_cycles_do_not_grow(name: str) -> None:
    """Memory grows by what allocators and caches of torch and Lightning keep, of plain DDP, too: less than a megabyte
    in three cycles."""
    for measured in harness.run(2, cycles, 200, SETTINGS[name], timeout=850.0):
        assert measured[-1][:2] == measured[0][:2]
        assert measured[-1][2] - measured[49][2] < 150 * 330


def destroyed_between(rank: int, port: int) -> list[float]:
    module, world = harness.make_module(), dist.group.WORLD
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for _ in range(2):
        dist.destroy_process_group()
        harness.trainer(harness.strategy(), devices=2, max_epochs=1).fit(module, harness.loader(16))
    assert dist.group.WORLD is not world
    return module.losses


def test_user_code_may_destroy_the_process_group_between_runs() -> None:
    first, _ = harness.run(2, destroyed_between, free_port())
    assert len(first) == 4
