"""Metrics in a run of the step that does not count: they keep their states, and may get values of other devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import nan
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.kept import unchanged
from lightning_gpp.stages.holes import Holes


@contextmanager
def states_kept(metrics: Sequence[Metric | MetricCollection], holes: Holes | None) -> Iterator[None]:
    """Restore the states of metrics when the context ends. Inside, updates with `holes` do nothing."""
    attributes = [(part, dict(vars(part))) for metric in metrics for part in metric.modules()]
    values = [value for _, found in attributes for value in found.values()]
    tensors = [(value, value.detach().clone()) for value in values if isinstance(value, torch.Tensor)]
    if holes is not None:
        for metric in metrics:
            _pass_over_holes(metric, holes.device)
    try:
        with unchanged([value for value in values if isinstance(value, list)]):
            yield
    finally:
        for part, found in attributes:
            vars(part).clear()
            vars(part).update(found)
        for tensor, value in tensors:
            tensor.data.copy_(value)


def _pass_over_holes(metric: Metric | MetricCollection, device: torch.device) -> None:
    """Give NaN instead of what a metric computes from values of other devices: numbers to log, and no others."""

    def answer(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves((args, kwargs))):
            return plain(*args, **kwargs)
        unknown = torch.tensor(nan, device=device)
        return dict.fromkeys(metric, unknown) if isinstance(metric, MetricCollection) else unknown

    for name in ("forward", "update"):
        vars(metric)[name] = functools.partial(answer, getattr(metric, name))
