"""Objects go from the step's rank to the others in one message, or in two if they are long."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_gpp.runtime.mesh import Mesh
from lightning_gpp.training.control import Control
from tests.distributed import run_each


def shared(rank: int, size: int) -> tuple[int, int]:
    control, messages = Control(Mesh(2, 1, rank)), list[Tensor]()
    share = control.share
    vars(control)["share"] = lambda tensor: messages.append(tensor) or share(tensor)
    value: Any = bytes(range(256)) * size if control.runs_step else None
    received = control.share_object(value)
    assert received == bytes(range(256)) * size
    return len(received), len(messages)


def test_objects_are_shared_in_as_few_messages_as_they_need() -> None:
    expected = {0: 1, 7: 1, 8: 2, 1000: 2}
    found = run_each(2, shared, [(size,) for size in expected])
    assert found == [[(256 * size, messages)] * 2 for size, messages in expected.items()]
