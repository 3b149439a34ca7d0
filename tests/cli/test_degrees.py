"""gpp-plan with `strategy.tensor_parallel_size=auto`: as many processes per device as are fastest, or as are needed."""

from __future__ import annotations

import pytest
from lightning import Trainer
from omegaconf import DictConfig
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpp_examples.feature_towers import FeatureTowers
from lightning_gpp import GPPStrategy
from lightning_gpp.cli.planning import show
from lightning_gpp.cli.sizes import best_of_sizes
from lightning_gpp.cli.task import task_of
from lightning_gpp.errors import ConfigError
from lightning_gpp.reports.units import rate
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
    config.strategy.tensor_parallel_size = "auto"
    config.strategy.search_seconds = 2
    return config


OWN = f"{__name__}.{Wide.__name__}"


def test_a_layer_too_large_for_one_process_is_divided(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of the trunk takes 0.4 GB with its gradient and Adam's state."""
    show(config_of(OWN, 0.3e9))
    text = " ".join(capsys.readouterr().out.split())
    assert "1: no plan" in text
    assert "Every device of the plan is 4 neighbouring processes (tensor parallelism)" in text
    assert "Fastest: strategy.tensor_parallel_size=4." in text


def test_the_fastest_number_is_chosen() -> None:
    _, prediction, (note,) = best_of_sizes(config_of(OWN))
    (degree,) = {stage.tensor_parallel_size for stage in prediction.plan.stages}
    assert f"Fastest: strategy.tensor_parallel_size={degree}. " in note
    assert f"{degree}: {rate(prediction.samples_per_second)} samples/s" in note


def test_processes_of_given_stages_have_to_fill_the_cluster() -> None:
    config = config_of(OWN)
    del config.strategy.tensor_parallel_size
    towers = ["mean_tower", "error_tower", "worst_tower"]
    config.strategy.stages = [
        {"modules": towers, "devices": [1]},
        {"modules": ["trunk", "@step"], "devices": [0], "tensor_parallel_size": 2},
    ]
    with pytest.raises(ConfigError, match="has 3 processes .*, which does not divide the 4 devices of"):
        task_of(config)


def test_a_model_that_divides_nothing_keeps_one_process() -> None:
    task, _, (note,) = best_of_sizes(config_of("gpp_examples.feature_towers.FeatureTowers"))
    assert not task.machine.divided
    assert "2: not possible. strategy.tensor_parallel_size=2, but the module is not divided" in note


def test_a_run_needs_the_number() -> None:
    """It is refused before other processes start."""
    strategy = GPPStrategy(tensor_parallel_size="auto")
    with pytest.raises(ConfigError, match=r"is for gpp-plan: .* train with strategy.plan=plan.yaml"):
        Trainer(strategy=strategy, accelerator="cpu", devices=1)
