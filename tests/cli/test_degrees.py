"""gpp-plan with `strategy.tensor_parallel_size`: several processes per device divide what does not fit on one."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpp_examples.feature_towers import FeatureTowers
from lightning_gpp.cli.planning import show
from lightning_gpp.cli.task import task_of
from lightning_gpp.errors import ConfigError, PlanError
from tests.cli.commands import composed

WIDTH = 2**18


class Wide(FeatureTowers):
    """A trunk of two layers with 25 million parameters each, which processes can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(96, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 96), nn.Linear(96, 1))

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            divided = {"trunk.0": ColwiseParallel(), "trunk.2": RowwiseParallel()}
            parallelize_module(self, self.device_mesh["tensor_parallel"], divided)


def config_of(name: str, memory_bytes: float = 80e9, *settings: str) -> DictConfig:
    config = composed("experiment=feature_towers", *settings, name="plan")
    device = {"name": "small", "memory_bytes": memory_bytes, "peak_flops": {"float32": 1e13}}
    node = {"device": device | {"peak_bytes_per_second": 1e12}, "count": 4, "link": {"bytes_per_second": 1e11}}
    config.strategy.cluster = {"nodes": [node], "between": {"bytes_per_second": 1e9}}
    config.trainer.devices = 4
    config.model = {"_target_": name}
    config.strategy.search_seconds = 2
    return config


OWN = f"{__name__}.{Wide.__name__}"


def test_a_layer_too_large_for_one_process_is_divided(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of the trunk takes 0.4 GB with its gradient and Adam's state."""
    config = config_of(OWN, 0.3e9)
    with pytest.raises(PlanError):
        show(config)
    config.strategy.tensor_parallel_size = 4
    show(config)
    text = " ".join(capsys.readouterr().out.split())
    assert "Every device of the plan is 4 neighbouring processes (tensor parallelism)" in text


def test_processes_have_to_divide_the_cluster() -> None:
    config = config_of(OWN)
    config.strategy.cluster.nodes[0].count = config.trainer.devices = 3
    config.strategy.tensor_parallel_size = 2
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not divide the 3 devices of"):
        task_of(config)


def test_a_model_that_divides_nothing_is_refused() -> None:
    config = config_of("gpp_examples.feature_towers.FeatureTowers")
    config.strategy.tensor_parallel_size = 2
    with pytest.raises(ConfigError, match="strategy.tensor_parallel_size=2, but the module is not divided"):
        task_of(config)
