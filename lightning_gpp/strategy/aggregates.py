"""Numbers that a training step gives to torchmetrics' aggregators (MeanMetric): one per mini-batch, as in one process.

    micro-batch 0, 3 samples    self.train_loss(0.5)    gives 0.5, and is undone when the step has run
    micro-batch 1, 1 sample     self.train_loss(0.9)    gives 0.9, and is undone
    complete                    self.train_loss(0.6)    counts

So what the step computes from a metric is that of the mini-batches before and of the present micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.wrappers import Running

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.metrics import metrics_of
from lightning_gpp.replaced import Replaced, replaced
from lightning_gpp.stages.kept_metrics import states_kept

_METHODS: Final = ("forward", "update", "reset")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a metric's method by the step, which ran on so many samples."""

    metric: Metric
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int

    def make(self) -> None:
        """Make the call."""
        getattr(self.metric, self.method)(*self.args, **self.kwargs)


class Aggregates:
    """Records what the training step gives to the aggregators of a module, and updates them once per mini-batch."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module, self._calls_itself = module, False
        self._runs: dict[int, list[dict[int, list[Call]]]] = {}
        self._epoch, self._found = -1, list[Metric]()

    @contextmanager
    def run(self, batch: int | None, num_samples: int) -> Iterator[None]:
        """Record a run of the training step on samples of a mini-batch of this number; nothing for None."""
        if batch is None:
            yield
            return
        run = dict[int, list[Call]]()
        with ExitStack() as kept:
            methods = Replaced()
            kept.callback(methods.restore)
            for metric in self._aggregators():
                for name in _METHODS:
                    given = partial(Call, metric, name, samples=num_samples)
                    methods.put(metric, name, partial(self._call, run, kept, given, getattr(metric, name)))
            yield
        self._runs.setdefault(batch, []).append(run)

    def _aggregators(self) -> list[Metric]:
        if self._epoch != self._module.current_epoch:  # hooks may have made others; looking takes a while
            found = [each for each in metrics_of(self._module).values() if isinstance(each, Metric)]
            inner = {id(part) for metric in found for part in metric.modules() if part is not metric}
            self._found = [metric for metric in found if id(metric) not in inner and _aggregates(metric)]
            self._epoch = self._module.current_epoch
        return self._found

    def _call(
        self,
        run: dict[int, list[Call]],
        kept: ExitStack,
        given: Callable[..., Call],
        plain: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._calls_itself:
            return plain(*args, **kwargs)
        call = given(args=_as_now(args), kwargs=_as_now(kwargs))
        if id(call.metric) not in run:
            kept.enter_context(states_kept([call.metric], None))
        run.setdefault(id(call.metric), []).append(call)
        with replaced(self, "_calls_itself", True):
            return plain(*args, **kwargs)

    def complete(self, batch: int) -> list[Metric]:
        """Update the metrics after the last run on a mini-batch. Returns those that have one value for it now."""
        runs, single = self._runs.pop(batch, []), []
        for number in dict.fromkeys(number for run in runs for number in run):
            calls = [run.get(number, []) for run in runs]
            together = [call for each in zip_longest(*calls) for call in _together([*filter(None, each)])]
            for call in together:
                call.make()
            if [call.method for call in together] == ["forward"]:
                single.append(together[0].metric)
        return single

    def forget(self, batches: Iterable[int]) -> None:
        """Drop the records of mini-batches."""
        for batch in batches:
            self._runs.pop(batch, None)


def _aggregates(metric: Metric) -> bool:
    return isinstance(metric.base_metric if isinstance(metric, Running) else metric, BaseAggregator)


def _as_now(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


def _together(calls: Sequence[Call]) -> Sequence[Call]:
    """The calls that belong together as one process makes them: one, unless the step calls differently each time."""
    first = calls[0]
    if len({call.method for call in calls}) > 1:
        return calls
    if len(calls) == 1 or first.method == "reset":
        return [first]
    try:
        values, weights = zip(*(_value_and_weight(*call.args, **call.kwargs) for call in calls), strict=True)
    except TypeError:  # arguments of a user's own aggregator
        return calls
    samples = [call.samples for call in calls]
    known = [weight for weight in weights if weight is not None]
    if known and len(known) < len(calls):
        return calls
    args = _combined(_tensors(values, first.metric), samples, _tensors(known, first.metric))
    return [replace(first, args=args, kwargs={})]


def _value_and_weight(value: Any, weight: Any = None) -> tuple[Any, Any]:
    return value, weight


def _tensors(values: Sequence[Any], metric: Metric) -> list[Tensor]:
    types = [torch.float64 if isinstance(value, float) else None for value in values]
    return [torch.as_tensor(value, dtype=dtype).to(metric.device) for value, dtype in zip(values, types, strict=True)]


def _combined(values: list[Tensor], samples: list[int], weights: list[Tensor]) -> tuple[Tensor, ...]:
    """The value of the mini-batch, and its weight if there are `weights`."""
    each = zip(values, samples, strict=True)
    if any(value.numel() != 1 for value in values) or all(value.shape[:1] == (size,) for value, size in each):
        spread = [torch.broadcast_to(weight, value.shape) for weight, value in zip(weights, values, strict=False)]
        return tuple(torch.cat(list(map(torch.atleast_1d, part))) for part in (values, spread) if part)
    numbers = torch.stack([value.reshape(()) for value in values])
    if weights:
        return _weighted_mean(numbers, torch.stack([weight.reshape(()) for weight in weights]))
    if not numbers.is_floating_point() and numbers.dtype != torch.bool:  # counts
        return (numbers.sum(),)
    return _weighted_mean(numbers, torch.tensor(samples).to(numbers.device, non_blocking=True))[:1]


def _weighted_mean(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the sum of the weights. What has no weight may be NaN: a mean of nothing."""
    total, counted = weights.sum(), torch.where(weights != 0, values.double(), 0.0)
    return (counted * weights).sum() / torch.where(total != 0, total, 1), total
