"""Random generators in attributes of the module go on as on one device, in front of the network and behind it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gpp.capture.own_streams import OwnStreams, unmoved
from tests.strategy import harness
from tests.strategy.harness import TwoTowers


class Drawing(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.before = SimpleNamespace(python=random.Random(0), numpy=np.random.RandomState(1))
        self.behind, self.torch = np.random.default_rng(2), torch.Generator().manual_seed(3)
        self.drawn: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        scale = 1 + self.before.python.random() + self.before.numpy.rand()
        noise = torch.randn(batch[0].shape, generator=self.torch, dtype=batch[0].dtype)
        output = super().training_step([scale * (batch[0] + noise), *batch[1:]], batch_idx)
        late = self.behind.random()
        self.drawn.append([scale, late])
        return {**output, "loss": output["loss"] * (1 + late)}


def drawn(strategy: Any, devices: int) -> tuple[list[float], list[list[float]]]:
    torch.manual_seed(0)
    module = Drawing().double()
    harness.trainer(strategy, devices, limit_val_batches=0).fit(module, harness.loader(), harness.loader())
    return module.losses, module.drawn


def drawn_in_stages(rank: int) -> list[Any]:
    return [drawn(harness.strategy(**settings), 2) for settings in ({"num_micro_batches": 1}, {"step": "whole"})]


def test_steps_draw_what_they_draw_on_one_device() -> None:
    losses, numbers = drawn("auto", 1)
    first, second = harness.run(2, drawn_in_stages)
    for other_losses, _ in (*first, *second):
        assert other_losses == pytest.approx(losses, rel=1e-12)
    assert [others for _, others in first] == [numbers, numbers]


def test_micro_batches_draw_again_what_their_inputs_drew() -> None:
    generator = random.Random(0)
    expected = [generator.random() for _ in range(4)]
    generator.seed(0)
    streams, found, counted = OwnStreams([generator]), list[float](), list[float]()
    for key in ((0, 0), (0, 1)):
        with streams.finding(key):
            found.append(generator.random())
    for key in ((0, 0), (0, 1)):
        with streams.counting(key):
            counted.append(generator.random())
    assert found == counted == expected[:2]
    assert generator.random() == expected[2]


def test_mini_batches_that_are_dropped_leave_nothing() -> None:
    generator = random.Random(0)
    expected = [generator.random() for _ in range(2)]
    generator.seed(0)
    streams = OwnStreams([generator])
    with streams.finding((0, 0)), streams.finding((1, 0)):
        generator.random()
    streams.forget(0)
    with streams.counting((1, 0)):
        generator.random()
    assert generator.random() == expected[1]


def test_generators_are_restored() -> None:
    sources = np.random.default_rng(0), np.random.RandomState(1), random.Random(2), torch.Generator()
    with unmoved(sources):
        first = _draw(*sources)
    assert _draw(*sources) == first


def _draw(one: np.random.Generator, two: np.random.RandomState, three: random.Random, four: torch.Generator) -> Any:
    return one.random(), two.rand(), three.random(), torch.rand((), generator=four).item()
