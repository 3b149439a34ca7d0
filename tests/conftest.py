"""What holds for every test: it runs on one thread, with wide lines and messages as the
commands show them, can be interrupted, and leaves no process group.

Several tests fit on a small machine that way; processes that tests start inherit the number of threads.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["LIGHTNING_GPP_WORDS"] = "hydra"  # messages name settings one way, see tests/test_wording.py
os.environ["COLUMNS"] = "300"  # tables are printed whole, wherever the tests run

import pytest  # noqa: E402
import torch  # noqa: E402  reads OMP_NUM_THREADS when it is imported

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; tests send this signal
    signal.signal(signal.SIGINT, signal.default_int_handler)

JOB_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"}


LONG = (
    *("test_scenarios", "test_matrix", "test_tensor_parallel", "test_data_parallel", "test_launch", "test_real_models"),
    *("test_caught", "test_train", "test_asynchronous", "test_sharded_checkpoints", "test_slices"),
)
"""Files with the tests that take longest. They come first, so that no worker is left alone with one of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture(autouse=True)
def leaves_no_job_behind() -> Iterator[None]:
    """A test that trains in pytest's own process would decide about the tests that follow it."""
    before = JOB_VARIABLES & set(os.environ)
    yield
    grouped, left = torch.distributed.is_initialized(), JOB_VARIABLES & set(os.environ) - before
    if grouped:  # the tests that follow are not to fail for it
        torch.distributed.destroy_process_group()
    for name in left:
        del os.environ[name]
    assert not grouped, "this test left a process group: run it in a process of its own"
    assert not left, f"this test left {sorted(left)} in the environment: run it in a process of its own"
