"""Types of the strategy's configuration, so that a wrong key or value is refused when the configuration is composed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class StrategySchema:
    """One field for each argument of `GPPStrategy` that a user sets; `configs/strategy/gpp.yaml` explains them."""

    _target_: str
    _convert_: str
    schedule: str | None
    num_micro_batches: int | None
    micro_batch_size: int | None
    stages: Any
    plan: str | None
    partitioner: str
    search_seconds: float
    cluster: Any
    costs: str
    max_replicas: int | None
    stages_per_device: int | None
    sharding: str
    num_pipelines: int | None
    chain_baseline: bool
    recompute: Any
    slices: Any
    slice_dim: int
    slice_modules: Any
    loss_reduction: str
    self_check: Any
    example_batch: Any
    trace: bool
    seed: int | None
    timeout: float
    failure_timeout: float
    process_group_backend: str | None


def register() -> None:
    """Make the types known to Hydra as `strategy/gpp_schema`."""
    ConfigStore.instance().store(group="strategy", name="gpp_schema", node=StrategySchema)
