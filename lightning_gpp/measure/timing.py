"""Times the forwards and backwards of blocks.

A stage consists of many blocks, but runs Python and autograd once. So this overhead is measured with an empty block and
subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_gpp.costs.model import Seconds
from lightning_gpp.runtime.stage import MicroBatch, StageModule

WARM_UPS: Final = 2
FEWEST: Final = 3
"""The least number of repetitions."""

CACHE_BYTES: Final = 16 << 20
"""Bytes of other data after which nothing of a block is left in the caches that a core can count on."""


class Times(NamedTuple):
    """Seconds of a forward, of a full backward, and of a backward to the inputs only."""

    forward: float
    backward: float
    inputs: float


class _Ran(NamedTuple):
    """A forward's seconds, differentiable outputs and inputs, and a gradient for each output."""

    seconds: float
    roots: list[Tensor]
    leaves: list[Tensor]
    seeds: list[Tensor]


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
        cold: whether each timed call begins without the block's data in the caches of a CPU.
        context: context in which modules compute, for example autocast; backwards run outside.
        budget: seconds per block, which may be exceeded to reach the least number of repetitions.
        after: called after every repetition.
    """

    device: torch.device
    context: Callable[[], AbstractContextManager[Any]]
    budget: float
    after: Callable[[], None]
    cold: bool = False
    _of_nothing: Times = field(init=False)
    _others: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._others = torch.zeros(CACHE_BYTES if self.cold else 0, dtype=torch.uint8)
        tiny = torch.ones(1, device=self.device, requires_grad=True)
        # the least, because a pause of this process would be subtracted from all blocks
        once = partial(self._repetition, _Nothing(), {"x": tiny}, MicroBatch(0, 0, 1, 1))
        self._of_nothing = Times(*self._chosen(min, once))

    def seconds(self, stage: StageModule, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> Seconds:
        """Median seconds. Input gradients are timed alone; weight gradients take the rest of the full backward."""
        times = self._chosen(median, partial(self._repetition, stage, values, micro_batch))
        pairs = zip(times, self._of_nothing, strict=True)
        forward, backward, inputs = (max(0.0, time - nothing) for time, nothing in pairs)
        inputs = min(inputs, backward)
        return Seconds(forward, inputs, backward - inputs)

    def _chosen(self, choose: Callable[[Sequence[float]], float], once: Callable[[], Times]) -> Iterator[float]:
        """One of the seconds of each part of a repetition."""
        for _ in range(WARM_UPS):
            once()
        stop = perf_counter() + self.budget
        repetitions: list[Times] = []
        while len(repetitions) < FEWEST or perf_counter() < stop:
            repetitions.append(once())
        return map(choose, zip(*repetitions, strict=True))

    def _repetition(self, stage: StageModule, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> Times:
        """Seconds of a forward, of its full backward, and of a backward to the inputs only after another forward."""
        first = self._forward(stage, values, micro_batch)
        backward = self._backward(first)
        second = self._forward(stage, values, micro_batch)
        inputs = 0.0
        if second.roots and second.leaves:
            grad = torch.autograd.grad
            inputs, _ = self._timed(lambda: grad(second.roots, second.leaves, second.seeds, allow_unused=True))
        self.after()
        return Times(first.seconds, backward, inputs)

    def _backward(self, forward: _Ran) -> float:
        backward = torch.autograd.backward
        return self._timed(lambda: backward(forward.roots, forward.seeds))[0] if forward.roots else 0.0

    def _forward(self, stage: StageModule, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> _Ran:
        given = {name: value.detach().requires_grad_(value.requires_grad) for name, value in values.items()}
        with self.context():
            seconds, outputs = self._timed(lambda: stage.forward(given, micro_batch))
        roots = [output for output in outputs.values() if output.requires_grad]
        leaves = [value for value in given.values() if value.requires_grad]
        return _Ran(seconds, roots, leaves, _seeds(roots))

    def _timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        if self.device.type == "cuda":
            return _timed_by_events(call, self.device)
        self._others.add_(1)
        start = perf_counter()
        result = call()
        return perf_counter() - start, result


def _seeds(roots: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(root) if root.dim() == 0 else torch.randn_like(root) for root in roots]


def _timed_by_events(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    torch.cuda.synchronize(device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    start.record(stream)
    result = call()
    stop.record(stream)
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop) / 1e3, result
