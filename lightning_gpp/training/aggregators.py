"""Calls of torchmetrics' aggregators (MeanMetric, SumMetric) in a run of the step, which are recorded and undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.wrappers import Running

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.metrics import metrics_of
from lightning_gpp.replaced import Replaced
from lightning_gpp.stages.kept_metrics import states_kept

_METHODS: Final = ("forward", "update", "reset")


@dataclass(frozen=True, slots=True)
class AggregatorCall:
    """A call of a metric's method."""

    metric: Metric
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self) -> None:
        """Make the call."""
        getattr(self.metric, self.method)(*self.args, **self.kwargs)

    def given(self) -> tuple[Any, Any] | None:
        """The value and its weight, which may be None; None for other arguments, those of a user's own aggregator."""
        try:
            return _value_and_weight(*self.args, **self.kwargs)
        except TypeError:
            return None

    def number(self) -> float | None:
        """The value, if it is a single number with a fraction, without a weight."""
        value, weight = self.given() or (None, None)
        if value is None or weight is not None:
            return None
        value = torch.as_tensor(value)
        return float(value) if value.numel() == 1 and value.is_floating_point() else None


def _value_and_weight(value: Any, weight: Any = None) -> tuple[Any, Any]:
    return value, weight


def aggregators_of(module: nn.Module) -> dict[str, Metric]:
    """The aggregators of a module by place, also in collections; not those that belong to other metrics."""
    found = {place: each for place, each in metrics_of(module).items() if isinstance(each, Metric)}
    inner = {id(part) for metric in found.values() for part in metric.modules() if part is not metric}
    return {place: metric for place, metric in found.items() if id(metric) not in inner and _aggregates(metric)}


def _aggregates(metric: Metric) -> bool:
    return isinstance(metric.base_metric if isinstance(metric, Running) else metric, BaseAggregator)


@contextmanager
def recorded(metrics: Mapping[str, Metric]) -> Iterator[dict[str, list[AggregatorCall]]]:
    """Record the calls inside, by the metrics' places. Afterwards the metrics are as before."""
    calls: dict[str, list[AggregatorCall]] = {}
    with ExitStack() as stack:
        methods = Replaced()
        stack.callback(methods.restore)
        for place, metric in metrics.items():
            watch = _Watch(metric, partial(calls.setdefault, place), stack)
            for name in _METHODS:
                methods.put(metric, name, partial(watch.call, name, getattr(metric, name)))
        yield calls


class _Watch:
    """Notes the calls that the step makes of a metric, and not those that its methods make of one another."""

    def __init__(
        self, metric: Metric, noted: Callable[[list[AggregatorCall]], list[AggregatorCall]], stack: ExitStack
    ) -> None:
        self._metric, self._noted, self._stack = metric, noted, stack
        self._inside = self._kept = False

    def call(self, method: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return plain(*args, **kwargs)
        if not self._kept:
            self._stack.enter_context(states_kept([self._metric], None))
        self._noted([]).append(AggregatorCall(self._metric, method, _as_now(args), _as_now(kwargs)))
        self._inside = self._kept = True
        try:
            return plain(*args, **kwargs)
        finally:
            self._inside = False


def _as_now(tree: Any) -> Any:
    """A copy, which later changes leave as it is; values of other devices (meta) as they are, which note calls."""
    return pytree.tree_map_only(Tensor, lambda each: each if each.is_meta else each.detach().clone(), tree)
