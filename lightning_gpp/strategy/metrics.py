"""torchmetrics objects: their states grow where the step runs; all ranks get them before an epoch ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.kept import metrics_in, metrics_of
from lightning_gpp.errors import ForeignTensorError
from lightning_gpp.training.control import Control


class MetricStates:
    """Keeps the metrics of a module and of callbacks equal on all ranks of a pipeline.

    They are synchronised over pipeline replicas only.
    """

    def __init__(self, module: pl.LightningModule, control: Control, device: torch.device) -> None:
        self.module, self.control, self.device = module, control, device
        self.behind = False
        """True if steps have run elsewhere since the states were shared."""
        self._counts: dict[int, int] = {}
        """The number of updates of each metric when its state was shared, by its identity."""

    def attach(self) -> None:
        """Move the metrics to the device, and let them synchronise over the pipeline replicas."""
        self._move(self.device)
        self._adopt()

    def _move(self, device: torch.device) -> None:
        for part in self.module.modules():
            if isinstance(part, Metric):
                part.to(device)

    def _adopt(self) -> None:
        """Change how metrics synchronise. It stays so after the run, when ranks still have the same states."""
        for path, metric in self._metrics().items():
            own, gather = _own(metric.distributed_available_fn), _own(metric.dist_sync_fn)
            several = own if self.control.num_pipelines > 1 else bool  # returns False: there is nobody else
            behind = partial(self._is_available, path, metric, several)
            metric.distributed_available_fn = _InRun.of(several if self.control.runs_step else behind, own)
            metric.dist_sync_fn = _InRun.of(partial(self._gather, gather or gather_all_tensors), gather)

    def _is_available(self, path: str, metric: Metric, own: Callable[[], bool]) -> bool:
        """True if other pipelines have states of a metric, whose value is asked for.

        Raises:
            ForeignTensorError: this rank has not the state of now.
        """
        if self.behind and metric.update_count == self._counts.get(id(metric), 0):
            raise ForeignTensorError(
                f"The value of the metric {path} is asked for between the ends of two epochs, on a rank that has its "
                "state of the last one: only the rank that runs the step has that of now. Log the metric "
                "(self.log(name, metric)), or compute it in the step, at the end of the epoch, or under "
                "`if trainer.is_global_zero`."
            )
        return own()

    def _gather(self, gather: Callable[..., Any], value: Tensor, group: object = None) -> Any:
        return gather(value, group=self.control.mesh.replica_group)

    def _metrics(self) -> dict[str, Metric]:
        return {path: metric for path, metric in self._all() if isinstance(metric, Metric)}

    def _all(self) -> Iterator[tuple[str, Metric | MetricCollection]]:
        yield from metrics_of(self.module).items()
        for number, callback in enumerate(getattr(self.module.trainer, "callbacks", ())):
            yield from metrics_in(callback, f"callbacks[{number}]")

    def detach(self) -> None:
        """Bring the states to the CPU."""
        self.behind = False
        self._move(torch.device("cpu"))

    def share(self) -> None:
        """Give the states of the step's rank to the other ranks of its pipeline."""
        self._adopt()  # metrics that hooks have made
        metrics = self._metrics()
        if not metrics or self.control.num_devices == 1:
            return
        for _, part in self._all():
            if isinstance(part, MetricCollection):
                list(part.items(copy_state=False))  # lets members of a compute group refer to their leader's state
        self.behind = False
        states = {
            path: {**each.metric_state, **{name: value for name, value in vars(each).items() if isinstance(value, int)}}
            for path, each in metrics.items()
        }
        received = self.control.share_object(pytree.tree_map_only(Tensor, torch.Tensor.cpu, states))
        if not self.control.runs_step:
            _set({path: metric for path, metric in metrics.items() if path in received}, received)
        self._counts = {id(metric): metric.update_count for metric in metrics.values()}


def _set(metrics: Mapping[str, Metric], states: Mapping[str, Mapping[str, Any]]) -> None:
    for metric in metrics.values():  # before any gets its state: a metric may reset those inside of it
        metric.reset()
    for path, metric in metrics.items():
        moved = pytree.tree_map_only(Tensor, partial(torch.Tensor.to, device=metric.device), states[path])
        for name, value in moved.items():
            setattr(metric, name, value)


class _InRun(partial[Any]):
    """A function of a metric since a run: its copies keep it, and files have the metric's own function, `own`."""

    own: Any

    @classmethod
    def of(cls, now: Callable[..., Any], own: Any) -> _InRun:
        """The function `now` in place of `own`."""
        made = cls(now)
        made.own = own
        return made

    def __copy__(self) -> _InRun:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _InRun:
        return self

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _as_it_is, (self.own,)


def _own(function: Any) -> Any:
    return function.own if isinstance(function, _InRun) else function


def _as_it_is(value: Any) -> Any:
    return value
