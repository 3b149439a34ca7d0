"""The arguments of `GPPFabricStrategy`: the options, and the components that every strategy of Fabric takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision

from lightning_gpp.errors import ConfigError
from lightning_gpp.training.options import Options
from lightning_gpp.training.whole.whole_step import check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricArguments(Options):
    """The options, and Fabric's components of a strategy."""

    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision: Precision | None = None
    accelerator: Accelerator | None = None


def in_own_loop(given: FabricArguments) -> FabricArguments:
    """The arguments for a loop that every rank runs, and that calls the module.

    Raises:
        ConfigError: an option needs a step that Lightning runs.
    """
    refused: dict[str, tuple[Any, str]] = {
        "step": (given.step == "micro_batches", "the loop runs on undivided mini-batches. Leave it out"),
        "tensor_parallel_size": (given.tensor_parallel_size != 1, "it is for Lightning's Trainer. Leave it out"),
        "stages" if given.plan is None else "plan": (
            given.tensor_parallel_size == 1 and given.degrees != (1,),
            "stages with several processes (tensor_parallel_size) are for Lightning's Trainer. Leave that out",
        ),
        "start_method": (
            given.start_method not in ("auto", "popen"),
            "Fabric runs the script again. Use popen",
        ),
        "example_batch": (given.example_batch is not None, "the first call of the module is the example. Leave it out"),
        "streaming": (given.streaming is True, "calls of the module end before the loop goes on. Leave it out"),
        "state_dict_type": (given.state_dict_type == "sharded", "fabric.save writes one file. Use full"),
        "async_save": (given.async_save, "fabric.save writes at once. Leave it out"),
    }
    for name, (found, reason) in refused.items():
        if found:
            value = "[...]" if name in ("example_batch", "stages", "plan") else repr(getattr(given, name))
            raise ConfigError(f"strategy.{name}={value} does not go together with Fabric: {reason}.")
    whole = replace(given, step="whole")
    check_whole(whole, steps_itself=True)
    return whole
