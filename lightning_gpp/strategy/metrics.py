"""torchmetrics objects: their states grow where the step runs; all ranks get them before an epoch ends."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_gpp._compat.lightning import metric_state, reset_metric
from lightning_gpp._compat.torch import pytree
from lightning_gpp.training.control import Control

_SYNC_ATTRIBUTES = ("process_group", "distributed_available_fn")


def metrics_of(module: pl.LightningModule) -> dict[str, Metric]:
    """The metrics of a module by path."""
    return {path: part for path, part in module.named_modules() if isinstance(part, Metric)}


class MetricStates:
    """Keeps the metrics of a module equal on all ranks of a pipeline, and synchronised over pipeline replicas only."""

    def __init__(self, module: pl.LightningModule, control: Control, device: torch.device) -> None:
        self.module, self.control, self.device = module, control, device
        self._plain: list[tuple[Metric, dict[str, Any]]] = []

    def attach(self) -> None:
        """Move the metrics to the device, and let them synchronise over the pipeline replicas."""
        for metric in metrics_of(self.module).values():
            metric.to(self.device)
            self._plain.append((metric, {name: getattr(metric, name) for name in _SYNC_ATTRIBUTES}))
            metric.process_group = self.control.mesh.replica_group
            if self.control.num_pipelines == 1:
                metric.distributed_available_fn = bool  # returns False: there is nobody to synchronise with

    def detach(self) -> None:
        """Undo `attach`, and bring the states to the CPU."""
        for metric, attributes in self._plain:
            for name, value in attributes.items():
                setattr(metric, name, value)
            metric.to("cpu")
        self._plain = []

    def share(self) -> None:
        """Give the states of the step's rank to the other ranks of its pipeline."""
        metrics = metrics_of(self.module)
        if not metrics or self.control.num_devices == 1:
            return
        for part in self.module.modules():
            if isinstance(part, MetricCollection):
                list(part.items(copy_state=False))  # lets members of a compute group refer to their leader's state
        states = {path: metric_state(metric) for path, metric in metrics.items()}
        received = self.control.share_object(pytree.tree_map_only(Tensor, torch.Tensor.cpu, states))
        if not self.control.runs_step:
            for path, (state, count) in received.items():
                self._set(metrics[path], state, count)

    def _set(self, metric: Metric, state: dict[str, Any], count: int) -> None:
        for name, value in pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), state).items():
            setattr(metric, name, value)
        reset_metric(metric, None, count)
