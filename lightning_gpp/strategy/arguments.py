"""The arguments of `GPPStrategy`: the options, and the components that every strategy of Lightning takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision

from lightning_gpp.training.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(Options):
    """The options, and Lightning's components of a strategy."""

    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None
    accelerator: Accelerator | None = None
