"""gpp-plan with `strategy.tensor_parallel_size=auto`: as many processes per device as are fastest, or as are needed,
for every stage.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpp_examples.feature_towers import FeatureTowers, Tower
from lightning_gpp import GPPStrategy
from lightning_gpp.cli.planning import show
from lightning_gpp.cli.sizes import best_of_sizes
from lightning_gpp.cli.task import predict, task_of
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.reports.units import rate
from tests.cli.commands import command, composed

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


class WideTowers(Wide):
    """Towers of 0.13 GB each with gradients and Adam's state, which nothing divides, and a trunk of 0.82 GB."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_tower, self.error_tower, self.worst_tower = (Tower(2048, 3) for _ in range(3))
        self.trunk = nn.Sequential(nn.Linear(6144, 2**13), nn.ReLU(), nn.Linear(2**13, 96), nn.Linear(96, 1))


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


def test_only_the_stage_that_is_too_large_has_several_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(f"{__name__}.{WideTowers.__name__}", 0.5e9, f"output={tmp_path / 'plan.yaml'}")
    show(config)
    text = " ".join(capsys.readouterr().out.split())
    assert "Fastest: stages with 1 or 2 processes per device (train with strategy.plan). 2: " in text
    assert "1: no plan" in text
    assert "Every device of the plan is one process or several neighbouring ones (tensor parallelism)" in text
    assert "3 devices are 4 processes" in text
    plan = Plan.load(tmp_path / "plan.yaml")
    trunk = {stage.tensor_parallel_size for stage in plan.stages if "trunk" in stage.modules}
    towers = {stage.tensor_parallel_size for stage in plan.stages if "mean_tower" in stage.modules}
    assert (trunk, towers) == ({2}, {1})
    del config.strategy.tensor_parallel_size
    config.strategy.plan = str(tmp_path / "plan.yaml")
    again = predict(task_of(config))
    assert again.plan.notes == plan.notes
    assert f"different numbers: {rate(again.samples_per_second)} samples/s" in text


@pytest.mark.acceptance
def test_a_plan_of_different_numbers_trains_and_tests(tmp_path: Path) -> None:
    model = [
        f"model._target_={__name__}.{WideTowers.__name__}",
        "~model.width",
        "~model.num_layers",
        "~model.learning_rate",
    ]
    OmegaConf.save(config_of(OWN, 0.5e9).strategy.cluster, tmp_path / "cluster.yaml")
    common = ["experiment=feature_towers", *model, "strategy.cluster=cluster.yaml", "trainer.devices=4"]
    searched = ["strategy.tensor_parallel_size=auto", "strategy.search_seconds=2", "output=plan.yaml"]
    planned = command("plan", *common, *searched, cwd=tmp_path)
    assert "Fastest: stages with 1 or 2 processes per device" in " ".join(planned.stdout.split())
    trained = command("train", *common, "strategy.plan=plan.yaml", "trainer.max_steps=2", cwd=tmp_path)
    assert "test/accuracy" in trained.stdout, trained.stderr


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
