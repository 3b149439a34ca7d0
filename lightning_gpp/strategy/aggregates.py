"""torchmetrics' aggregators (MeanMetric, SumMetric) in the training step, which get a number from each micro-batch.

A mean of equally large micro-batches is that of the mini-batch, and counts add up. What may differ is told once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from torchmetrics import MeanMetric, Metric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.wrappers import Running

from lightning_gpp.capture.metrics import metrics_of


class AggregatorWatch:
    """Notes which aggregators of a module the training step updates, and warns of those that may differ.

    Args:
        module: the trainer's module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._sizes: dict[int, dict[str, list[int]]] = {}
        self._epoch, self._known, self._told = -1, dict[str, Metric](), set[str]()

    @contextmanager
    def run(self, batch: int | None, num_samples: int) -> Iterator[None]:
        """Watch a run of the training step on samples of a mini-batch of this number; nothing for None."""
        if batch is None:
            yield
            return
        if self._epoch != self._module.current_epoch:  # hooks may have made others; looking takes a while
            self._epoch, self._known = self._module.current_epoch, _aggregators(self._module)
        before = self._counts()
        yield
        for place, count in self._counts().items():
            if count > before[place]:
                self._sizes.setdefault(batch, {}).setdefault(place, []).append(num_samples)

    def _counts(self) -> dict[str, int]:
        return {place: metric.update_count for place, metric in self._known.items()}

    def complete(self, batch: int) -> None:
        """Warn, after the last run on a mini-batch, of aggregators that got several numbers for it."""
        for place, sizes in self._sizes.pop(batch, {}).items():
            equal = isinstance(self._known[place], MeanMetric) and len(set(sizes)) == 1
            if len(sizes) > 1 and not equal and place not in self._told:
                self._told.add(place)
                warnings.warn(
                    f"The training step updates the {type(self._known[place]).__name__} {place!r} with a number from "
                    f"each micro-batch (of {', '.join(map(str, sizes))} samples), where one process has one from each "
                    "mini-batch. Counts add up; a sum, maximum or minimum of losses, and a mean of micro-batches of "
                    "unequal sizes differ. Log the value itself (self.log(name, value, reduce_fx=...)), which is "
                    "combined by samples; or set strategy.step=whole.",
                    stacklevel=2,
                )

    def forget(self, batches: Iterable[int]) -> None:
        """Drop the notes of mini-batches."""
        for batch in batches:
            self._sizes.pop(batch, None)


def _aggregators(module: pl.LightningModule) -> dict[str, Metric]:
    found = {place: each for place, each in metrics_of(module).items() if isinstance(each, Metric)}
    return {place: metric for place, metric in found.items() if isinstance(metric, BaseAggregator | Running)}
