"""Numbers that a training step gives to torchmetrics' aggregators (MeanMetric): one per mini-batch, as in one process.

    micro-batch 0, 3 samples    self.train_loss(0.5)    gives 0.5, and is undone when the step has run
    micro-batch 1, 1 sample     self.train_loss(0.9)    gives 0.9, and is undone
    complete                    self.train_loss(0.6)    counts

So what the step computes from a metric is that of the mini-batches before and of the present micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gpp.training.aggregators import AggregatorCall, aggregators_of, recorded

Sized = tuple[AggregatorCall, int]
"""A call, and the number of samples on which the step ran."""


class Aggregates:
    """Records what the training step gives to the aggregators of a module, and updates them once per mini-batch.

    Attributes:
        reductions: how the values of micro-batches follow from samples, by metric and number of its call in a step;
            those that are missing are means.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self.reductions: dict[tuple[str, int], str] = {}
        self._runs: dict[int, list[dict[str, list[Sized]]]] = {}
        self._epoch, self._metrics = -1, dict[str, Metric]()

    @contextmanager
    def run(self, batch: int | None, num_samples: int) -> Iterator[None]:
        """Record a run of the training step on samples of a mini-batch of this number; nothing for None."""
        if batch is None:
            yield
            return
        if self._epoch != self._module.current_epoch:  # hooks may have made others; looking takes a while
            self._epoch, self._metrics = self._module.current_epoch, aggregators_of(self._module)
        with recorded(self._metrics) as found:
            yield
        run = {place: [(call, num_samples) for call in calls] for place, calls in found.items()}
        self._runs.setdefault(batch, []).append(run)

    def complete(self, batch: int) -> list[Metric]:
        """Update the metrics after the last run on a mini-batch. Returns those that have one value for it now."""
        runs, single = self._runs.pop(batch, []), []
        for place in dict.fromkeys(place for run in runs for place in run):
            calls = self._of_mini_batch(place, [run.get(place, []) for run in runs])
            for call in calls:
                call.make()
            if [call.method for call in calls] == ["forward"]:
                single.append(calls[0].metric)
        return single

    def _of_mini_batch(self, place: str, runs: Sequence[Sequence[Sized]]) -> list[AggregatorCall]:
        """The calls of a metric, of which the n-th ones of all runs belong together."""
        calls = list[AggregatorCall]()
        for number, same in enumerate(zip_longest(*runs)):
            calls += _together([*filter(None, same)], self.reductions.get((place, number), "mean"))
        return calls

    def forget(self, batches: Iterable[int]) -> None:
        """Drop the records of mini-batches."""
        for batch in batches:
            self._runs.pop(batch, None)


def _together(sized: Sequence[Sized], reduction: str) -> Sequence[AggregatorCall]:
    """The calls as one process makes them: one, unless the step calls differently each time."""
    calls, samples = [call for call, _ in sized], [size for _, size in sized]
    first = calls[0]
    if len({call.method for call in calls}) > 1:
        return calls
    if len(calls) == 1 or first.method == "reset":
        return [first]
    given = [pair for pair in (call.given() for call in calls) if pair is not None]
    weights = [weight for _, weight in given if weight is not None]
    if len(given) < len(calls) or 0 < len(weights) < len(calls):
        return calls
    values = _tensors([value for value, _ in given], first.metric)
    args = _combined(values, samples, _tensors(weights, first.metric), reduction)
    return [replace(first, args=args, kwargs={})]


def _tensors(values: Sequence[Any], metric: Metric) -> list[Tensor]:
    types = [torch.float64 if isinstance(value, float) else None for value in values]
    return [torch.as_tensor(value, dtype=dtype).to(metric.device) for value, dtype in zip(values, types, strict=True)]


def _combined(values: list[Tensor], samples: list[int], weights: list[Tensor], reduction: str) -> tuple[Tensor, ...]:
    """The value of the mini-batch, and its weight if there are `weights`."""
    each = zip(values, samples, strict=True)
    if any(value.numel() != 1 for value in values) or all(value.shape[:1] == (size,) for value, size in each):
        spread = [torch.broadcast_to(weight, value.shape) for weight, value in zip(weights, values, strict=False)]
        return tuple(torch.cat(list(map(torch.atleast_1d, part))) for part in (values, spread) if part)
    numbers = torch.stack([value.reshape(()) for value in values])
    if weights:
        return _weighted_mean(numbers, torch.stack([weight.reshape(()) for weight in weights]))
    if reduction in ("max", "min"):
        return (numbers.max() if reduction == "max" else numbers.min(),)
    is_count = not numbers.is_floating_point() and numbers.dtype != torch.bool
    if is_count or reduction == "sum":
        return (numbers.sum(),)
    return _weighted_mean(numbers, torch.tensor(samples).to(numbers.device, non_blocking=True))[:1]


def _weighted_mean(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the sum of the weights. What has no weight may be NaN: a mean of nothing."""
    total, counted = weights.sum(), torch.where(weights != 0, values.double(), 0.0)
    return (counted * weights).sum() / torch.where(total != 0, total, 1), total
