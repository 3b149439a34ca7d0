"""Refuses options that contradict each other, before anything is built.

`Options` checks itself on its way into the world, so its class cannot be named here.
"""

from __future__ import annotations

from typing import Any

from lightning_gpp.errors import ConfigError
from lightning_gpp.option import Problems, refuse_beside
from lightning_gpp.planning.assignment.complete import check_one_given, check_sharded_slices
from lightning_gpp.planning.assignment.manual import read
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
    if options.slicing is not None:
        check_sharded_slices(options.sharding, is_sliced=True)
    if options.weights != SYNCHRONOUS:
        check_policy(options.weights, options.weight_options or {})
    refuse_beside(f"strategy.weights={options.weights}", options, _beside_weights(options))
    for beside, problems in _problems(options).items():
        refuse_beside(f"strategy.{beside}", options, problems)
    _check_sharding(options)
    _check_layout(options)
    _check_stages(options)
    _check_members(options)


def _beside_weights(options: Any) -> Problems:
    if options.weights == SYNCHRONOUS:
        reason = "is for asynchronous training. Choose a weight policy (strategy.weights=stash), or leave it out"
        names = ("weight_options", "synchronous_steps", "flush_every", "delayed_devices")
        return {name: (bool(getattr(options, name)), reason) for name in names}
    predicts = options.weights == "predicted" and options.sharding in ("zero1", "auto")
    return {
        "on_nonfinite": (options.on_nonfinite == "skip", "needs a flush before each step. Use stop"),
        "schedule": (options.schedule == AUTO, "compares schedules that flush. Use 1f1b"),
        "sharding": (
            options.sharding == "fsdp" or predicts,
            "splits what a policy predicts by, the state of optimizers. Use strategy.sharding=none, or weights=stash"
            if predicts
            else "gathers parameters for one mini-batch at a time. Use strategy.sharding=zero1",
        ),
    }


def _problems(options: Any) -> dict[str, Problems]:
    """Options that exclude others, and these."""
    unsliced = options.slices is None
    sliced, sharded = options.slicing is not None, options.sharding == "fsdp"
    unused = "is given without the number of slices. Give that, or leave it out"
    return {
        "slices=null": {
            "slice_dim": (unsliced and options.slice_dim != 1, unused),
            "slice_modules": (unsliced and options.slice_modules is not None, unused),
        },
        f"slices={options.slices}": {
            "offload": (
                sliced and bool(options.offload),
                "moves tensors that slices hand on, which stay on the device. Use strategy.recompute",
            )
        },
        f"sharding={options.sharding}": {
            "streaming": (
                sharded and options.streaming is True,
                "needs parameters for several mini-batches at a time. Use strategy.streaming=auto, which then flushes",
            )
        },
    }


def _check_members(options: Any) -> None:
    """Refuse what the processes of one device cannot do together."""
    plan = options.plan
    if (options.tensor_parallel_size == AUTO and plan is None) or options.degrees == (1,):
        return
    sliced = options.slicing is not None or (plan is not None and plan.is_sliced)
    offloads = bool(options.offload) or (plan is not None and any(stage.offload for stage in plan.stages))
    problems = {
        "sharding": (options.sharding == "fsdp", "shards what members have already divided. Use zero1"),
        "weights": (options.weights != SYNCHRONOUS, f"keeps copies of undivided weights. Use {SYNCHRONOUS}"),
        "slices": (sliced, "cuts sequences inside the modules that are divided. Leave it out"),
        "step": (options.step == "whole", "runs the user's step apart from the stages. Use micro_batches"),
        "streaming": (options.streaming is True, "reads data ahead, on one process. Use auto, which then flushes"),
        "offload": (offloads, "is not checked for several members. Leave it out"),
        "costs": (options.costs == "measured", "times undivided blocks on one process. Use roofline"),
        "trace": (options.trace, "draws one process per device. Leave it out"),
    }
    refuse_beside(_members_said(options), options, problems)


def _members_said(options: Any) -> str:
    """The setting that gives devices several processes."""
    most = max(options.degrees)
    if most == options.tensor_parallel_size:
        return f"strategy.tensor_parallel_size={most}"
    return f"tensor_parallel_size={most} of a stage in strategy.{'stages' if options.plan is None else 'plan'}"


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
