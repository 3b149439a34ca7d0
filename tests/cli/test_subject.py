"""gpp-plan builds a model without memory for its parameters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning import LightningDataModule
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpp_examples.feature_towers import FeatureTowers
from lightning_gpp.cli.configured import built
from lightning_gpp.cli.subject import Step, _captured, captured, first_batch
from lightning_gpp.cli.task import predict, task_of
from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.schedules.actions import Kind
from tests.cli.commands import composed


class Huge(FeatureTowers):
    """A network of 64 GB in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(96, 2**17), nn.Linear(2**17, 2**17), nn.Linear(2**17, 1))


class Scaled(FeatureTowers):
    """Its constructor and its step compute with values of its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = float(self.trunk[0].weight.norm())
        self.table = torch.ones(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.gain * self.table.sum()


def config_of(model: type) -> DictConfig:
    config = composed("experiment=feature_towers", name="plan")
    config.model = {"_target_": f"{__name__}.{model.__name__}"}
    return config


def step_of(config: DictConfig) -> Step:
    return captured(config, built(config.strategy).options)


def content(graph: OperatorGraph) -> list[Any]:
    return [*graph, *graph.nx.edges(data=True), graph.parameter_bytes, graph.buffer_bytes]


def test_a_model_larger_than_memory_is_planned() -> None:
    step = step_of(config_of(Huge))
    assert {parameter.device.type for parameter in step.model.parameters()} == {"meta"}
    assert sum(step.step.graph.parameter_bytes.values()) > 2**36


@pytest.mark.parametrize("experiment", ["two_tower", pytest.param("gpt_text", marks=pytest.mark.acceptance)])
def test_its_operators_are_those_of_the_model_in_memory(experiment: str) -> None:
    config = composed(f"experiment={experiment}", name="plan")
    lean = step_of(config)
    assert {parameter.device.type for parameter in lean.model.parameters()} == {"meta"}
    full = _captured(config, built(config.strategy).options, nullcontext)
    assert {parameter.device.type for parameter in full.model.parameters()} == {"cpu"}
    assert content(lean.step.graph) == content(full.step.graph)


def test_a_model_that_reads_its_parameters_gets_them() -> None:
    step = step_of(config_of(Scaled))
    assert {parameter.device.type for parameter in step.model.parameters()} == {"cpu"}


def test_a_run_that_only_evaluates_is_planned_without_backwards() -> None:
    settings = ("experiment=two_tower", "trainer.devices=4", "strategy.search_seconds=2")
    trained = predict(task_of(composed(*settings, name="plan")))
    found = predict(task_of(composed(*settings, "step=validation_step", name="plan")))
    assert not any(edge.differentiable for edge in found.plan.edges)
    assert {span.action.kind for row in found.timeline.devices for span in row} == {Kind.DATA, Kind.FORWARD}
    assert found.period is not None
    assert trained.period is None
    assert found.seconds < trained.seconds / 3
    assert max(found.peak_bytes) < max(trained.peak_bytes) / 3
    assert found.lower_bound <= found.seconds


def test_a_step_without_data_is_told() -> None:
    with pytest.raises(ConfigError, match="step=predict_step: CaptionedDigits has no predict_dataloader"):
        task_of(composed("experiment=two_tower", "step=predict_step", name="plan"))
    with pytest.raises(ConfigError, match="step=forward; choose one of training_step, validation_step"):
        task_of(composed("experiment=two_tower", "step=forward", name="plan"))


class Empty(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(3)), batch_size=4, drop_last=True)


def test_data_without_a_mini_batch_are_told() -> None:
    with pytest.raises(ConfigError, match=r"Empty\.train_dataloader has no mini-batch"):
        first_batch(Empty())
