"""Objects go from the step's rank to the others in one message, or in two if they are long."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lightning_gpp.runtime.mesh import Mesh
from lightning_gpp.training.control import Control
from tests.distributed import run_distributed


def shared(rank: int, size: int) -> tuple[int, int]:
    control, messages = Control(Mesh(2, 1, rank)), list[Tensor]()
    share = control.share
    vars(control)["share"] = lambda tensor: messages.append(tensor) or share(tensor)
    value: Any = bytes(range(256)) * size if control.runs_step else None
    received = control.share_object(value)
    assert received == bytes(range(256)) * size
    return len(received), len(messages)


@pytest.mark.parametrize(("size", "messages"), [(0, 1), (7, 1), (8, 2), (1000, 2)])
def test_objects_are_shared_in_as_few_messages_as_they_need(size: int, messages: int) -> None:
    assert run_distributed(2, shared, size) == [(256 * size, messages)] * 2
