"""Hardware queues of GPUs: as many as a process has streams."""

import os

import pytest

from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.mesh import MOST_QUEUES, QUEUES, check_queues, open_queues

TOWERS = [link for tower in range(1, 5) for link in ((0, tower), (tower, 0))]
"""Four towers whose results join on process 0: eight links there, two elsewhere."""


@pytest.mark.parametrize("environment", [{QUEUES: "1"}, {QUEUES: "10"}, {QUEUES: "many"}, {}])
def test_fewer_queues_than_streams_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"11 streams.*variable to {MOST_QUEUES}"):
        check_queues(TOWERS, environment)
    check_queues(TOWERS, {QUEUES: "11"})


def test_queues_are_opened_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(QUEUES, raising=False)
    open_queues()
    assert os.environ[QUEUES] == str(MOST_QUEUES)
    monkeypatch.setenv(QUEUES, "16")
    open_queues()
    assert os.environ[QUEUES] == "16"
