"""The settings of the strategy, checked when they are given, before there is a model or a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.distributed.fsdp import FSDPModule

from lightning_gpp.cluster import Cluster
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import SHARDINGS, Plan
from lightning_gpp.planning.assignment.placement import KEYS, Placement, read
from lightning_gpp.planning.assignment.slices import Slicing
from lightning_gpp.planning.folding import check_replicas
from lightning_gpp.planning.problem.registry import partitioner_of
from lightning_gpp.schedules.registry import Method, method_of, schedule_names
from lightning_gpp.training.slice_options import slicing_from

StageSpec = Placement
"""Manual placement: module path -> stage number, or stages with the keys modules, name, devices, micro_batch_size; with
the key inputs too, where the user declares the edges between stages."""

Context = Callable[[], AbstractContextManager[Any]]
"""Makes a context to compute in, for example autocast."""


AUTO: Final = "auto"
"""The name of the schedule that leaves the choice to the planner: the fastest one that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `GPPStrategy` was told; see there for the meaning of each."""

    schedule: str | None
    num_micro_batches: int | None
    micro_batch_size: int | None
    stages: StageSpec | None
    plan: Plan | None
    partitioner: str
    search_seconds: float
    cluster: Cluster | str | None
    costs: Literal["roofline", "measured"]
    max_replicas: int | None
    stages_per_device: int | None
    sharding: str
    num_pipelines: int | None
    chain_baseline: bool
    recompute: bool | Sequence[str] | None
    slices: int | Sequence[int] | None
    slice_dim: int
    slice_modules: Sequence[str] | None
    loss_reduction: Literal["mean", "sum"]
    self_check: bool | Literal["auto"]
    example_batch: Any
    trace: bool
    seed: int | None
    timeout: timedelta
    failure_timeout: timedelta

    def __post_init__(self) -> None:
        check(self)

    @property
    def slicing(self) -> Slicing | None:
        """How stages are cut along the sequence; None if the settings leave them whole, or as a given plan has them."""
        return slicing_from(self.slices, self.slice_dim, self.slice_modules)


def check(options: Options) -> None:
    """Raise ConfigError where a setting cannot work, whatever the model."""
    _check_counts(options)
    _check_choices(options)
    _check_recompute(options.recompute)
    _check_seconds(options.search_seconds)
    _check_slices(options)
    _check_sharding(options.sharding)
    if options.schedule not in (AUTO, None):
        _check_layout(options, method_of(options.schedule))
    partitioner_of(options.partitioner)
    entries = read(placement_of(options.stages)) if options.stages is not None else []
    if options.plan is not None and options.stages is not None:
        raise ConfigError("Both strategy.plan and strategy.stages are given; a plan already says where stages are.")
    if options.stages_per_device and (options.plan or any(entry.devices is not None for entry in entries)):
        raise ConfigError(
            f"strategy.stages_per_device={options.stages_per_device} cannot move the stages of strategy.plan, nor "
            "strategy.stages with `devices`: they say where stages are. Leave it out, or leave out the plan (the "
            "`devices`) to have stages laid out anew."
        )
    for name in ("timeout", "failure_timeout"):
        if getattr(options, name).total_seconds() <= 0:
            raise ConfigError(f"strategy.{name} is {getattr(options, name)}; it must be more than 0 seconds.")


def _check_counts(options: Options) -> None:
    for name in ("num_micro_batches", "micro_batch_size", "max_replicas", "stages_per_device", "num_pipelines"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"strategy.{name} is {value!r}; it must be a whole number >= 1, or None.")
    if options.num_micro_batches is not None and options.micro_batch_size is not None:
        raise ConfigError(
            f"Both strategy.num_micro_batches={options.num_micro_batches} and "
            f"strategy.micro_batch_size={options.micro_batch_size} are given; each follows from the other: give one."
        )


def _check_choices(options: Options) -> None:
    choices: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("costs", ("roofline", "measured")),
        ("sharding", SHARDINGS),
        ("loss_reduction", ("mean", "sum")),
        ("self_check", ("auto", True, False)),
    )
    for name, allowed in choices:
        if getattr(options, name) not in allowed:
            values = ", ".join(map(repr, allowed))
            raise ConfigError(f"strategy.{name} is {getattr(options, name)!r}; it must be one of {values}.")


def _check_sharding(sharding: str) -> None:
    if sharding == "fsdp" and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            "strategy.sharding=fsdp needs a torch whose FSDP can reduce gradients that only some ranks have (2.13 can; "
            f"{torch.__version__} cannot): replicas may use different parameters. Update torch, or use "
            "strategy.sharding=zero1."
        )


def _check_slices(options: Options) -> None:
    if options.slicing is None:
        return
    if options.sharding == "fsdp":
        raise ConfigError(
            f"strategy.slices={options.slices} and strategy.sharding=fsdp cannot be combined: a slice would gather the "
            "parameters of its stage for itself. Use strategy.sharding=zero1, or remove strategy.slices."
        )
    listed = isinstance(options.stages, Sequence) and not isinstance(options.stages, str)
    if listed and any(isinstance(entry, Mapping) and "inputs" in entry for entry in options.stages or ()):
        raise ConfigError(
            f"strategy.slices={options.slices} needs a captured model, to know what is cut; strategy.stages declares "
            "edges (`inputs`), which leaves capture out. Remove `inputs`, or strategy.slices."
        )


def _check_seconds(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"strategy.search_seconds is {value!r}; it must be more than 0 seconds.")


def _check_recompute(recompute: Any) -> None:
    listed = isinstance(recompute, Sequence) and not isinstance(recompute, str)
    if listed and all(isinstance(name, str) for name in recompute):
        return
    if recompute is not None and not isinstance(recompute, bool):
        raise ConfigError(
            f"strategy.recompute is {recompute!r}; it must be true, false, a list of names of stages, or null for what "
            "the plan says."
        )


def _check_layout(options: Options, method: Method) -> None:
    """Schedules that lay stages out themselves leave no choice to `stages` and `max_replicas`."""
    number = options.stages_per_device or method.stages_per_device
    if number == 1 and not method.bidirectional:
        return
    check_replicas(str(options.schedule), options.max_replicas)
    entries = read(placement_of(options.stages)) if options.stages is not None else []
    if method.bidirectional and any(entry.devices is not None for entry in entries):
        raise ConfigError(
            f"strategy.schedule={options.schedule!r} gives every stage a second device, opposite the first: leave "
            "`devices` out of strategy.stages, or choose a schedule of one direction (interleaved, zbv)."
        )


DEFAULT: Final = "1f1b"
"""The schedule where neither the settings nor a plan name one."""


def schedules_of(options: Options) -> tuple[str, ...]:
    """The schedules to choose from, for stages that no plan says."""
    return schedule_names() if options.schedule == AUTO else (options.schedule or DEFAULT,)


def placement_of(stages: StageSpec) -> Placement:
    """The placement without the edges that the user may have declared."""
    if isinstance(stages, Mapping):
        return stages
    return [{key: value for key, value in _mapping(entry).items() if key != "inputs"} for entry in stages]


def _mapping(entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"strategy.stages: {entry!r} is not a mapping with the keys {', '.join(KEYS)}, inputs.")
    return entry


def seconds(name: str, value: float | timedelta) -> timedelta:
    """A duration given in seconds or as timedelta.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"strategy.{name} is {value!r}; give seconds as a number, or a datetime.timedelta.")
    return timedelta(seconds=value)


def load_plan(plan: Plan | str | Path | None) -> Plan | None:
    """The plan itself, or the one in a file."""
    return plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
