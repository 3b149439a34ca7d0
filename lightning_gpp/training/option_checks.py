"""Refuses options that contradict each other, before anything is built.

`Options` checks itself on its way into the world, so its class cannot be named here.
"""

from __future__ import annotations

from typing import Any

from lightning_gpp.errors import ConfigError
from lightning_gpp.planning.assignment.complete import check_sharded_slices
from lightning_gpp.planning.assignment.stages_spec import read
from lightning_gpp.planning.micro_batches import check_one_given
from lightning_gpp.planning.request import check_replicas
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.training.option_values import AUTO, SYNCHRONOUS, check_policy


def check_together(options: Any) -> None:
    """Refuse options that contradict each other, or that this version of torch does not support.

    Args:
        options: the `Options`.

    Raises:
        ConfigError: names the options and a remedy.
    """
    check_one_given(options.num_micro_batches, options.micro_batch_size)
    _check_slices(options)
    _check_sharding(options)
    _check_layout(options)
    _check_stages(options)
    _check_weights(options)
    _check_streaming(options)
    _check_members(options)


def _check_members(options: Any) -> None:
    """Refuse what the processes of one device cannot do together."""
    plan = options.plan
    if (options.tensor_parallel_size == AUTO and plan is None) or options.degrees == (1,):
        return
    sliced = options.slicing is not None or (plan is not None and plan.is_sliced)
    offloads = bool(options.offload) or (plan is not None and any(stage.offload for stage in plan.stages))
    refused = {
        "sharding": (options.sharding == "fsdp", "shards what members have already divided. Use zero1"),
        "weights": (options.weights != SYNCHRONOUS, f"keeps copies of undivided weights. Use {SYNCHRONOUS}"),
        "slices": (sliced, "cuts sequences inside the modules that are divided. Leave it out"),
        "step": (options.step == "whole", "runs the user's step apart from the stages. Use micro_batches"),
        "streaming": (options.streaming is True, "reads data ahead, on one process. Use auto, which then flushes"),
        "offload": (offloads, "is not checked for several members. Leave it out"),
        "costs": (options.costs == "measured", "times undivided blocks on one process. Use roofline"),
        "trace": (options.trace, "draws one process per device. Leave it out"),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise ConfigError(
                f"strategy.{name}={getattr(options, name)!r} does not go together with {_members_said(options)}: it "
                f"{reason}."
            )


def _members_said(options: Any) -> str:
    """The setting that gives devices several processes."""
    most = max(options.degrees)
    if most == options.tensor_parallel_size:
        return f"strategy.tensor_parallel_size={most}"
    return f"tensor_parallel_size={most} of a stage in strategy.{'stages' if options.plan is None else 'plan'}"


def _check_slices(options: Any) -> None:
    if options.slices is None:
        _check_unused(options)
    if options.slicing is None:
        return
    check_sharded_slices(options.sharding, is_sliced=True)
    if options.offload:
        raise ConfigError(
            f"strategy.slices={options.slices} cannot be combined with strategy.offload={options.offload!r}: slices "
            "hand on tensors that stay on the device. Use strategy.recompute, or remove strategy.slices."
        )


def _check_unused(options: Any) -> None:
    dim, modules = options.slice_dim, options.slice_modules
    unused = [f"slice_dim={dim}"] * (dim != 1) + [f"slice_modules={modules}"] * (modules is not None)
    if unused:
        raise ConfigError(f"strategy.{unused[0]} is given without strategy.slices, the number of slices.")


def _check_sharding(options: Any) -> None:
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


def _check_layout(options: Any) -> None:
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


def _check_stages(options: Any) -> None:
    if options.plan is not None and options.stages is not None:
        raise ConfigError("Both strategy.plan and strategy.stages are given, but a plan contains stages; give one.")
    if options.stages_per_device and (options.plan or _on_devices(options)):
        raise ConfigError(
            f"strategy.stages_per_device={options.stages_per_device} cannot move the stages of strategy.plan, nor "
            "strategy.stages with `devices`: these already have devices. Leave it out, or leave out the plan (or the "
            "`devices`) to have the stages laid out."
        )


def _on_devices(options: Any) -> bool:
    """True if the user's stages have devices of the user's choice."""
    entries = read(options.stages) if options.stages is not None else []
    return any(entry.devices is not None for entry in entries)


def _check_weights(options: Any) -> None:
    if options.weights != SYNCHRONOUS:
        check_policy(options.weights, options.weight_options or {})
        _check_without_flush(options)
        return
    if options.clip_norm == "stage":
        raise ConfigError(
            f"strategy.clip_norm=stage is for asynchronous training, and strategy.weights is {SYNCHRONOUS}, where the "
            "full model's norm is known in time. Remove strategy.clip_norm, or choose a weight policy "
            "(strategy.weights=stash)."
        )
    for name in ("weight_options", "synchronous_steps", "flush_every", "delayed_devices"):
        if getattr(options, name):
            raise ConfigError(
                f"strategy.{name}={getattr(options, name)} is for asynchronous training, and strategy.weights is "
                f"{SYNCHRONOUS}. Choose a weight policy (strategy.weights=stash), or remove strategy.{name}."
            )


def _check_without_flush(options: Any) -> None:
    """Refuse what needs a flush, with the nearest that does not."""
    refused = {
        "on_nonfinite=skip": (options.on_nonfinite == "skip", "strategy.on_nonfinite=stop"),
        "schedule=auto": (options.schedule == AUTO, "strategy.schedule=1f1b"),
        "sharding=fsdp": (options.sharding == "fsdp", "strategy.sharding=zero1"),
    }
    for given, (found, instead) in refused.items():
        if found:
            raise ConfigError(
                f"strategy.{given} cannot be combined with strategy.weights={options.weights}, which does not flush "
                f"the pipeline. Use {instead}, or strategy.weights={SYNCHRONOUS}."
            )
    if options.weights == "predicted" and options.sharding in ("zero1", "auto"):
        raise ConfigError(
            "strategy.weights=predicted cannot be combined with strategy.sharding=zero1: a replica predicts by the "
            "state of its optimizer, of which it has a part. Use strategy.sharding=none, or strategy.weights=stash."
        )


def _check_streaming(options: Any) -> None:
    if options.streaming is True and options.sharding == "fsdp":
        raise ConfigError(
            "strategy.streaming=true cannot be combined with strategy.sharding=fsdp, which gathers parameters for one "
            "mini-batch at a time. Use strategy.streaming=auto, which then flushes, or another strategy.sharding."
        )
