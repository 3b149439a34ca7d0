"""Times calls, and the forwards and backwards of blocks.

A stage consists of many blocks, but runs Python and autograd once. So this overhead is measured with an empty block and
subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from lightning_gpp.runtime.stage import MicroBatch, StageModule


def seconds_of(call: Callable[[], object], at_most: float) -> float:
    """Median of the seconds of one call, repeated for about `at_most` seconds; a CPU computes with one thread, as in a
    process of a pipeline."""
    return float(Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=at_most).median)


class _Nothing:
    """A stage without operators."""

    uses_random = False
    parts = ()

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        return {name: value.view_as(value) for name, value in values.items()}


@dataclass
class BlockTimer:
    """Runs blocks repeatedly, as the executor runs a stage.

    Args:
        device: device of the tensors.
        context: context in which modules compute, for example autocast; backwards run outside.
        budget: seconds per block.
        after: called after every forward.
    """

    device: torch.device
    context: Callable[[], AbstractContextManager[Any]]
    budget: float
    after: Callable[[], None]
    _of_nothing: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        tiny = torch.ones(1, device=self.device, requires_grad=True)
        self._of_nothing = self._seconds(_Nothing(), {"x": tiny}, MicroBatch(0, 0, 1, 1))

    def seconds(self, stage: StageModule, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> tuple[float, float]:
        """Seconds of a forward, and of its backward."""
        forward, backward = self._seconds(stage, values, micro_batch)
        return max(0.0, forward - self._of_nothing[0]), max(0.0, backward - self._of_nothing[1])

    def _seconds(
        self, stage: StageModule, values: Mapping[str, Tensor], micro_batch: MicroBatch
    ) -> tuple[float, float]:
        def forward() -> list[Tensor]:
            given = {name: value.detach().requires_grad_(value.requires_grad) for name, value in values.items()}
            with self.context():
                outputs = stage.forward(given, micro_batch)
            self.after()
            return [output for output in outputs.values() if output.requires_grad]

        def both() -> None:
            roots = forward()
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

        trains = bool(forward())
        alone = seconds_of(forward, self.budget / 2)
        return alone, seconds_of(both, self.budget / 2) - alone if trains else 0.0
