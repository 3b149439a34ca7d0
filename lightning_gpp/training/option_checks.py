"""Options that cannot be combined, whatever the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_gpp.errors import ConfigError
from lightning_gpp.planning.assignment.placement import read
from lightning_gpp.planning.folding import check_replicas
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.training.option_values import AUTO, without_inputs

if TYPE_CHECKING:
    from lightning_gpp.training.options import Options


def check_together(options: Options) -> None:
    """Refuse options that contradict each other, or that this version of torch has no support for.

    Raises:
        ConfigError: names the options and a remedy.
    """
    _check_micro_batches(options)
    _check_slices(options)
    _check_sharding(options)
    _check_layout(options)
    _check_stages(options)


def _check_micro_batches(options: Options) -> None:
    if options.num_micro_batches is not None and options.micro_batch_size is not None:
        raise ConfigError(
            f"Both strategy.num_micro_batches={options.num_micro_batches} and "
            f"strategy.micro_batch_size={options.micro_batch_size} are given; each follows from the other: give one."
        )


def _check_slices(options: Options) -> None:
    if options.slices is None:
        _check_unused(options)
    if options.slicing is None:
        return
    if options.sharding == "fsdp":
        raise ConfigError(
            f"strategy.slices={options.slices} and strategy.sharding=fsdp cannot be combined: a slice would gather the "
            "parameters of its stage for itself. Use strategy.sharding=zero1, or remove strategy.slices."
        )
    listed = [] if isinstance(options.stages, Mapping) else options.stages or []
    if any("inputs" in entry for entry in listed):
        raise ConfigError(
            f"strategy.slices={options.slices} needs a captured model, to know what is cut; strategy.stages declares "
            "edges (`inputs`), which leaves capture out. Remove `inputs`, or strategy.slices."
        )


def _check_unused(options: Options) -> None:
    dim, modules = options.slice_dim, options.slice_modules
    unused = [f"slice_dim={dim}"] * (dim != 1) + [f"slice_modules={modules}"] * (modules is not None)
    if unused:
        raise ConfigError(f"strategy.{unused[0]} is given without strategy.slices, which says into how many.")


def _check_sharding(options: Options) -> None:
    if options.sharding != "fsdp":
        return
    import torch  # takes a second to load; the commands' help, which knows all options, need not wait for it
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            "strategy.sharding=fsdp needs a torch whose FSDP can reduce gradients that only some ranks have (2.13 can; "
            f"{torch.__version__} cannot): replicas may use different parameters. Update torch, or use "
            "strategy.sharding=zero1."
        )


def _check_layout(options: Options) -> None:
    """Refuse stages on devices, and replicas, for a schedule that lays stages out itself."""
    if options.schedule in (AUTO, None):
        return
    method = method_of(str(options.schedule))
    number = options.stages_per_device or method.stages_per_device
    if number == 1 and not method.bidirectional:
        return
    check_replicas(str(options.schedule), options.max_replicas)
    if method.bidirectional and _on_devices(options):
        raise ConfigError(
            f"strategy.schedule={options.schedule!r} gives every stage a second device, opposite the first: leave "
            "`devices` out of strategy.stages, or choose a schedule of one direction (interleaved, zbv)."
        )


def _check_stages(options: Options) -> None:
    if options.plan is not None and options.stages is not None:
        raise ConfigError("Both strategy.plan and strategy.stages are given; a plan already says where stages are.")
    if options.stages_per_device and (options.plan or _on_devices(options)):
        raise ConfigError(
            f"strategy.stages_per_device={options.stages_per_device} cannot move the stages of strategy.plan, nor "
            "strategy.stages with `devices`: they say where stages are. Leave it out, or leave out the plan (the "
            "`devices`) to have stages laid out anew."
        )


def _on_devices(options: Options) -> bool:
    """Whether the stages that the user wrote are on devices of the user's choice."""
    entries = read(without_inputs(options.stages)) if options.stages is not None else []
    return any(entry.devices is not None for entry in entries)
