"""Costs of the user's model for planning, measured on a device of this machine."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from lightning_gpp.capture import Capture
from lightning_gpp.cluster import Cluster
from lightning_gpp.costs.measured import MeasuredCosts
from lightning_gpp.errors import ConfigError
from lightning_gpp.measure.costs import measure_costs
from lightning_gpp.planning.micro_batches import resolve_size
from lightning_gpp.stages.undivided import Captured
from lightning_gpp.training.options import Context, Options

QUARTER: Final = 4


def measured_costs(
    captured: Captured,
    module: nn.Module,
    batch: Any,
    options: Options,
    cluster: Cluster,
    *,
    device: torch.device,
    context: Context,
) -> MeasuredCosts:
    """Measured costs of operators on a device of this machine, with the largest micro-batch and with a quarter of it.

    Args:
        captured: the training step.
        module: the step's module.
        batch: a mini-batch with values.
        options: the options, which may give the size of micro-batches; the default is a quarter of the mini-batch.
        cluster: a cluster whose first device is of the same kind.
        device: the device to measure on.
        context: context in which the step computes.

    Raises:
        ConfigError: the step was not captured, so there are no operators to measure.
    """
    if not isinstance(captured, Capture):
        raise ConfigError(
            "strategy.costs=measured needs a captured step, but this one cannot be captured. Choose "
            "strategy.costs=roofline."
        )
    size = resolve_size(captured.batch_size, options.num_micro_batches, options.micro_batch_size, QUARTER)
    sizes, kind = sorted({max(1, size // QUARTER), size}), cluster.kinds[0]
    return measure_costs(captured, module, batch, device=kind, sizes=sizes, torch_device=device, context=context)
