"""Hardware queues of GPUs: as many as a device has streams."""

import os

import pytest

from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.queues import MOST, VARIABLE, check_queues, open_queues, streams_of

BRANCHES = [pair for tower in range(1, 5) for pair in ((0, tower), (tower, 0))]
"""Four towers whose results join on device 0."""

ALONE = (1,) * 5


def test_a_device_has_a_stream_for_each_neighbour_and_direction() -> None:
    assert streams_of(BRANCHES, 0, ALONE) == 2 + 8
    assert streams_of(BRANCHES, 3, ALONE) == 2 + 2
    assert streams_of([*BRANCHES, *BRANCHES], 3, ALONE) == 2 + 2


def test_members_have_a_stream_for_each_process_that_receives_from_them() -> None:
    members = (2, 1, 2, 8, 1)
    assert streams_of(BRANCHES, 0, members) == 2 + 1 + (1 + 1 + 4 + 1) + 4
    assert streams_of(BRANCHES, 1, members) == 2 + 2 + 1
    assert streams_of(BRANCHES, 3, members) == 2 + 1 + 1 + 1


@pytest.mark.parametrize("environment", [{VARIABLE: "1"}, {VARIABLE: "9"}, {VARIABLE: "many"}, {}])
def test_fewer_queues_than_streams_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"device 0 of the plan has 10 streams.*Set the variable to {MOST}"):
        check_queues(BRANCHES, ALONE, environment)


def test_queues_are_opened_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    open_queues()
    assert os.environ[VARIABLE] == str(MOST)
    monkeypatch.setenv(VARIABLE, "16")
    open_queues()
    assert os.environ[VARIABLE] == "16"
