"""The values of options: conversions from the form in which they are given, names that are registered at run time, and
what contradicts each other, before anything is built.

`Options` checks itself on its way into the world, so its class cannot be named here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from lightning_gpp.cluster import CLUSTERS, Cluster, cluster_of, load_cluster
from lightning_gpp.errors import ConfigError, close_to, did_you_mean
from lightning_gpp.option import Problems, refusal, refuse_beside
from lightning_gpp.plan import Plan
from lightning_gpp.planning import partitioner_names
from lightning_gpp.planning.assignment.complete import check_one_given, check_sharded_slices
from lightning_gpp.planning.assignment.manual import StagesSpec, read
from lightning_gpp.planning.request import check_replicas
from lightning_gpp.schedules.registry import method_of, schedule_names
from lightning_gpp.simulation import WeightCopies
from lightning_gpp.validation import shown

SYNCHRONOUS: Final = "synchronous"
"""The value of `weights` for synchronous training: every mini-batch is computed with the newest weights."""

AUTO: Final = "auto"
"""The name of the schedule that leaves the choice to the planner: the fastest one that fits."""

ClusterSpec: TypeAlias = Cluster | Mapping[str, Any] | str | Path | None
"""A cluster, its settings, the name of a preset, or the path of a YAML file; None for the present machine."""

_YEAR: Final = 365 * 24 * 3600


def loaded_plan(plan: Any) -> Plan | None:
    """The plan itself, or the one in a file.

    Raises:
        ConfigError: it is neither.
        PlanError: the file cannot be read, or is not a plan.
    """
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return Plan.load(plan)
    raise refusal("plan", plan, "a Plan, the path of a saved one, or null")


def check_policy(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if there is no weight policy of this name, or it has no such options."""
    from lightning_gpp.runtime.weights import check_options  # loads torch; the commands' help need not wait for it

    check_options(name, dict(options))


def weight_copies_of(name: str) -> WeightCopies | None:
    """The copies of weights that a policy keeps, by the delay of a stage; None for synchronous training."""
    if name == SYNCHRONOUS:
        return None
    from lightning_gpp.runtime.weights import copies_of  # see above

    return partial(copies_of, name)


def reduction_given(name: Any) -> str:
    """The way in which losses combine.

    Raises:
        ConfigError: it is neither mean, nor sum, nor a part of the mini-batch.
    """
    from lightning_gpp.stages.counts import reduction  # see above

    return str(name) if name in ("mean", "sum") else reduction(name)


def rows_given(rows: Any) -> Mapping[str, str] | None:
    """The parts that say to which samples rows belong, by the path of the tensor.

    Raises:
        ConfigError: it has another form.
    """
    from lightning_gpp.stages.rows import RowOwner  # see above

    if rows is None:
        return None
    if not isinstance(rows, Mapping) or not all(isinstance(v, str) and RowOwner.parsed(v) for v in rows.values()):
        raise refusal("batch_rows", rows, "a mapping from paths to path, path:onlyN or path:product, or null")
    return {str(name): str(owner) for name, owner in rows.items()}


def division_given(by: Any) -> str | Callable[..., Any]:
    """The division of mini-batches into micro-batches.

    Raises:
        ConfigError: it is neither a function nor one of the words, nor the entries of a tensor.
    """
    from lightning_gpp.stages.counts import Counted  # see above

    if callable(by):
        return cast("Callable[..., Any]", by)
    if isinstance(by, str) and (by in ("samples", "documents") or (":" in by and Counted.parsed(by))):
        return by
    raise refusal(
        "micro_batch_by", by, "samples, documents, the entries of a mask (attention_mask:except0), or a function"
    )


def weights_given(name: Any) -> str:
    """The name of a weight policy, or "synchronous".

    Raises:
        ConfigError: there is no such policy.
    """
    if name != SYNCHRONOUS:
        check_policy(str(name), {})
    return str(name)


def cluster_given(cluster: Any) -> Cluster | str | None:
    """The cluster, or the name of a preset, whose number of nodes will follow from the job.

    Raises:
        ConfigError: there is no such preset or file, or the settings are wrong.
    """
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Mapping):
        return cluster_of(cluster)
    name = str(cluster)
    if name in CLUSTERS:
        return name
    if Path(name).suffix in (".yaml", ".yml"):
        try:
            return load_cluster(name)
        except ConfigError as error:
            raise ConfigError(f"strategy.cluster={error}") from error  # the message begins with the path
    raise ConfigError(
        f"strategy.cluster={name!r} is neither the name of a cluster nor a YAML file.{did_you_mean(name, CLUSTERS)}"
    )


def dims_given(dims: Any) -> Mapping[str, int | None] | None:
    """The dimensions that count samples, by the path of a part of the mini-batch; of the mini-batch itself it is "".

    Raises:
        ConfigError: it has none of the forms.
    """
    if dims is None:
        return None
    named = {"": dims} if isinstance(dims, int) else dims
    whole = isinstance(named, Mapping) and all(type(dim) is int or dim is None for dim in named.values())
    if not whole or isinstance(dims, bool):
        raise refusal("batch_dims", dims, "a number, a mapping from paths in the batch to numbers or null, or null")
    return {str(name): dim for name, dim in named.items()}


def stages_given(stages: Any) -> StagesSpec | None:
    """The stages spec itself, after a check.

    Raises:
        ConfigError: it has none of the forms.
    """
    if stages is None:
        return None
    if isinstance(stages, str) or not isinstance(stages, Mapping | Sequence):
        raise refusal("stages", stages, "a mapping such as {encoder: 0, decoder: 1}, a list of stages, or null")
    read(stages)
    return stages


def schedule_given(name: Any) -> str | None:
    """The name of a registered schedule, "auto", or None."""
    return None if name is None else _registered("schedule", name, (AUTO, *schedule_names()))


def partitioner_given(name: Any) -> str:
    """The name of a registered partitioner."""
    return _registered("partitioner", name, partitioner_names())


def _registered(option: str, name: Any, names: Sequence[str]) -> str:
    if isinstance(name, str) and name in names:
        return name
    allowed = f"one of {', '.join(names)} (or of those that @lightning_gpp.register_{option} has added)"
    close = close_to(str(name).lower(), names)
    raise ConfigError(f"{refusal(option, name, allowed).args[0]}{f' Did you mean {close[0]}?' if close else ''}")


def duration(option: str) -> Callable[[Any], timedelta]:
    """The conversion of an option that is given in seconds or as a timedelta, and is not zero."""

    def convert(value: Any) -> timedelta:
        if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
            raise ConfigError(f"strategy.{option} is {value!r}; give seconds as a number, or a datetime.timedelta.")
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        if not 0 < seconds <= _YEAR:
            raise refusal(option, value, f"more than 0 seconds, and at most a year ({_YEAR} seconds)")
        return timedelta(seconds=seconds)

    return convert


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
        reason = "is for asynchronous training. Leave it out"
        names = ("weight_options", "synchronous_steps", "flush_every")
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
    sliced, sharded = options.slicing is not None, options.sharding == "fsdp"
    local, sums = bool(options.local_losses), options.loss_reduction != "mean"
    by_hand = options.stages is not None and options.partitioner != AUTO
    return {
        **_beside_division(options),
        "stages": {"partitioner": (by_hand, "finds stages, and these are given. Leave one of them out")},
        f"local_losses={options.local_losses}": {
            "loss_reduction": (local and sums, "weighs losses by what only the step's process knows. Use mean"),
            "slices": (local and sliced, "cuts the sequences of a loss. Leave it out"),
        },
        "slices=null": {
            "slice_modules": (
                options.slices is None and options.slice_modules is not None,
                "is given without the number of slices. Leave it out",
            ),
        },
        f"slices={options.slices}": {
            "offload": (
                sliced and bool(options.offload),
                "moves tensors that slices hand on, which stay on the device. Use strategy.recompute",
            )
        },
        f"cuda_graphs={options.cuda_graphs}": _beside_graphs(options) if options.cuda_graphs is True else {},
        f"concurrent_stages={options.concurrent_stages}": _beside_streams(options),
        f"sharding={options.sharding}": {
            "streaming": (
                sharded and options.streaming is True,
                "needs parameters for several mini-batches at a time. Use strategy.streaming=auto, which then flushes",
            )
        },
    }


def _beside_graphs(options: Any) -> Problems:
    """Options with which nothing can be recorded."""
    return {
        "weights": (options.weights != SYNCHRONOUS, "computes with other values than the parameters'. Leave it out"),
        "sharding": (options.sharding == "fsdp", "moves parameters between actions. Use zero1"),
        "step": (options.step == "whole", "runs forwards and backwards apart. Leave it out"),
        "tensor_parallel_size": (options.tensor_parallel_size != 1, "has messages inside stages. Leave it out"),
        "offload": (bool(options.offload), "moves activations while stages compute. Use strategy.recompute"),
    }


def _beside_streams(options: Any) -> Problems:
    """Options that keep stages of one GPU from computing at the same time."""
    if options.concurrent_stages == 1:
        return {}
    return {
        "weights": (options.weights != SYNCHRONOUS, f"computes in the order of its weights. Use {SYNCHRONOUS}"),
        "sharding": (options.sharding == "fsdp", "gathers parameters in one order. Use zero1"),
        "step": (options.step == "whole", "runs forwards and backwards apart. Leave it out"),
        "offload": (bool(options.offload), "has a stream of its own. Use strategy.recompute"),
        "costs": (options.costs == "measured", "times blocks that have the device to themselves. Use roofline"),
        "max_replicas": (options.max_replicas not in (None, 1), "divides samples among devices. Leave it out"),
    }


def _beside_division(options: Any) -> dict[str, Problems]:
    """Options that exclude micro-batches with sizes of their own."""
    name = "micro_batch_by" if options.micro_batch_by != "samples" else "batch_rows"
    if name == "batch_rows" and not options.batch_rows:
        return {}
    sized = options.micro_batch_size is not None
    return {
        f"{name}={shown(getattr(options, name))}": {
            "micro_batch_size": (sized, "counts samples, and they differ. Use strategy.num_micro_batches"),
            "weights": (options.weights != SYNCHRONOUS, f"keeps several mini-batches in flight. Use {SYNCHRONOUS}"),
            "slices": (options.slicing is not None, "cuts sequences of one length. Leave it out"),
            "local_losses": (bool(options.local_losses), "weighs losses by equal numbers of samples. Leave it out"),
            "step": (options.step == "whole", "does not divide mini-batches. Leave one of them out"),
            "plan": (
                options.plan is not None and any(len(stage.devices) > 1 for stage in options.plan.stages),
                "has stages with replicas, which share a micro-batch. Use strategy.num_pipelines for data parallelism",
            ),
            "max_replicas": (
                options.max_replicas not in (None, 1),
                "lets replicas of a stage share a micro-batch. Use strategy.num_pipelines for data parallelism",
            ),
            "tensor_parallel_size": (options.tensor_parallel_size != 1, "is not made for changing sizes. Leave it out"),
        }
    }


def _check_members(options: Any) -> None:
    """Refuse what the processes of one device cannot do together."""
    plan = options.plan
    if options.members == 1:
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
    refuse_beside(f"strategy.tensor_parallel_size={options.members}", options, problems)


def _check_sharding(options: Any) -> None:
    if options.sharding != "fsdp":
        return
    import torch  # takes a second to load; the commands' help, which knows all options, need not wait for it
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            "strategy.sharding=fsdp needs a torch whose FSDP can reduce gradients that only some ranks have (2.13 "
            f"can; {torch.__version__} cannot): replicas may use different parameters. Use strategy.sharding=zero1."
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
            "`devices` out of strategy.stages."
        )


def _check_stages(options: Any) -> None:
    if options.plan is not None and options.stages is not None:
        raise ConfigError("Both strategy.plan and strategy.stages are given, but a plan contains stages; give one.")
    if options.stages_per_device and (options.plan or _on_devices(options)):
        raise ConfigError(
            f"strategy.stages_per_device={options.stages_per_device} cannot move the stages of strategy.plan, nor "
            "strategy.stages with `devices`: these already have devices. Leave it out."
        )


def _on_devices(options: Any) -> bool:
    """True if the user's stages have devices of the user's choice."""
    entries = read(options.stages) if options.stages is not None else []
    return any(entry.devices is not None for entry in entries)
