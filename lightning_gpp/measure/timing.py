"""Times the forwards and backwards of blocks, and what it takes to run them again in their backward.

A stage consists of many blocks, but runs Python and autograd once. So this overhead is measured with an empty block and
subtracted.

Running a block again takes another forward, and time in Python: some for the block, and some for each tensor that
autograd saves. Both are measured with tiny blocks. Large blocks would not show them: where they get their memory from
makes more of a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_gpp.costs.measured import MeasuredSeconds
from lightning_gpp.runtime.recompute import recomputed
from lightning_gpp.runtime.stage import MicroBatch, StageModule

WARM_UPS: Final = 2
FEWEST: Final = 3
"""The least number of repetitions."""

CACHE_BYTES: Final = 16 << 20
"""Bytes of other data after which nothing of a block is left in the caches that a core can count on."""

MANY: Final = 32
"""Saved tensors of the tiny block that shows what each takes."""


StageCall = Callable[[Mapping[str, Tensor], MicroBatch], dict[str, Tensor]]
"""The forward of a stage."""


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
class _Saving(_Nothing):
    """A stage for which autograd saves this many tensors."""

    number: int

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        value = values["x"]
        for _ in range(self.number):
            value = value.sin()
        return {"x": value}


@dataclass(kw_only=True)
class BlockTimer:
    """Runs blocks repeatedly, as the executor runs a stage.

    Args:
        device: device of the tensors.
        cold: whether each timed call begins without the block's data in the caches of a CPU.
        context: context in which modules compute, for example autocast; backwards run outside.
        budget: seconds per block, which may be exceeded to reach the least number of repetitions.
        after: called after every repetition.

    `seconds_per_rerun`: what running any block again takes, besides what it takes for its operators.
    """

    device: torch.device
    context: Callable[[], AbstractContextManager[Any]]
    budget: float
    after: Callable[[], None]
    cold: bool = False
    seconds_per_rerun: float = field(init=False)
    _per_saved_tensor: float = field(init=False)
    _of_nothing: Times = field(init=False)
    _others: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._others = torch.zeros(CACHE_BYTES if self.cold else 0, dtype=torch.uint8)
        tiny = torch.ones(1, device=self.device, requires_grad=True)
        alone = {"x": tiny}, MicroBatch(0, 0, 1, 1)
        # the least, because a pause of this process would be subtracted from all blocks
        self._of_nothing = Times(*self._chosen(min, partial(self._repetition, _Nothing(), *alone)))
        few = many = 0.0
        if self.device.type != "cuda":  # there, kernels run while Python prepares the next ones
            few, many = (self._rerun(_Saving(number), *alone) for number in (1, 1 + MANY))
        self._per_saved_tensor = max(0.0, many - few) / MANY
        self.seconds_per_rerun = max(0.0, few - self._per_saved_tensor)

    def seconds(self, stage: StageModule, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> MeasuredSeconds:
        """Median seconds. Input gradients are timed alone; weight gradients take the rest of the full backward."""
        number = self._num_saved(stage, values, micro_batch)
        times = self._chosen(median, partial(self._repetition, stage, values, micro_batch))
        pairs = zip(times, self._of_nothing, strict=True)
        forward, backward, inputs = (max(0.0, time - nothing) for time, nothing in pairs)
        inputs = min(inputs, backward)
        return MeasuredSeconds(forward, inputs, backward - inputs, number * self._per_saved_tensor)

    def _num_saved(self, stage: StageModule, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> int:
        """The number of tensors that autograd saves."""
        count = itertools.count()
        with saved_tensors_hooks(lambda _: next(count), lambda _: None):  # type: ignore[arg-type, return-value]
            self._forward(stage.forward, values, micro_batch)
        self.after()
        return next(count)

    def _chosen(
        self, choose: Callable[[Sequence[float]], float], once: Callable[[], Sequence[float]]
    ) -> Iterator[float]:
        """One of the seconds of each part of a repetition."""
        for _ in range(WARM_UPS):
            once()
        stop = perf_counter() + self.budget
        repetitions: list[Sequence[float]] = []
        while len(repetitions) < FEWEST or perf_counter() < stop:
            repetitions.append(once())
        return map(choose, zip(*repetitions, strict=True))

    def _repetition(self, stage: StageModule, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> Times:
        """Seconds of a forward, of its full backward, and of a backward to the inputs only after another forward."""
        first = self._forward(stage.forward, values, micro_batch)
        backward = self._backward(first)
        second = self._forward(stage.forward, values, micro_batch)
        inputs = 0.0
        if second.roots and second.leaves:
            grad = torch.autograd.grad
            inputs, _ = self._timed(lambda: grad(second.roots, second.leaves, second.seeds, allow_unused=True))
        self.after()
        return Times(first.seconds, backward, inputs)

    def _rerun(self, stage: StageModule, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> float:
        """Seconds that running a stage again takes besides another forward."""
        again = recomputed(stage.forward, stage.parts)

        def once() -> tuple[float]:
            kept, repeated = (self._forward(run, values, micro_batch) for run in (stage.forward, again))
            return (repeated.seconds + self._backward(repeated) - 2 * kept.seconds - self._backward(kept),)

        return next(self._chosen(median, once))

    def _backward(self, forward: _Ran) -> float:
        backward = torch.autograd.backward
        return self._timed(lambda: backward(forward.roots, forward.seeds))[0] if forward.roots else 0.0

    def _forward(self, run: StageCall, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> _Ran:
        given = {name: value.detach().requires_grad_(value.requires_grad) for name, value in values.items()}
        with self.context():
            seconds, outputs = self._timed(lambda: run(given, micro_batch))
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
