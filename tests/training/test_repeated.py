"""The comparison during training: when, of which samples, and what it says."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.training.copies import step_copy
from lightning_gpp.training.repeated import KeptResults, Losses, _most_samples, _some, samples_of_parts
from lightning_gpp.training.runner import ComparisonTurns

SAMPLES = TensorSpec(shape=(Affine(1, 0), Affine(0, 3)), dtype="float64")
SCALAR = TensorSpec(shape=(), dtype="float64")


def test_powers_of_two_are_compared_and_starts_of_epochs_while_these_are_few() -> None:
    turns = ComparisonTurns()
    assert [number for number in range(40) if turns.next(epoch=0)] == [0, 1, 2, 4, 8, 16, 32]
    turns = ComparisonTurns()
    compared = [number for number in range(400) if turns.next(epoch=number // 5)]
    assert {5, 10, 15} <= set(compared)
    assert len(compared) <= 9 + 400 / 16 + math.log2(400)


def losses(whole: float, *parts: float) -> Losses:
    return Losses(whole, (parts[0], parts[1]), sizes=(2, 4), dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "sums", "message"),
    [
        (losses(3.0, 1.0, 4.0), False, ""),
        (losses(5.0, 1.0, 4.0), True, ""),
        (losses(5.0, 1.0, 4.0), False, "This loss is a sum over samples: set strategy.loss_reduction"),
        (losses(3.0, 1.0, 4.0), True, "This loss is a mean over samples: set strategy.loss_reduction"),
        (losses(2.0, 1.0, 4.0), False, "In mini-batch 7, the loss of 6 samples is 2 undivided, and 3 as the mean over"),
        (losses(2.0, 1.0, 4.0), False, "micro-batches of 2 and 4. So training .*strategy.step=whole"),
        (losses(2.0, math.nan, 2.0), False, "and nan as the mean"),
        (losses(math.nan, math.nan, math.nan), False, ""),
        (losses(1e-12, 1.0, -0.5), False, ""),  # losses that cancel out, but for rounding
    ],
)
def test_a_difference_is_told_with_its_remedy(given: Losses, sums: bool, message: str) -> None:
    text = given.warning(7, 1e-9, sums)
    assert bool(text) == bool(message)
    if message:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(text)


def test_a_number_of_samples_that_stays_constant_makes_no_sum() -> None:
    assert Losses(5.0, (1.0, 4.0), (2, 4), torch.float64, with_constants=True).warning(7, 1e-9, sums=False) == ""
    assert Losses(2.0, (1.0, 4.0), (2, 4), torch.float64, with_constants=True).warning(7, 1e-9, sums=False) != ""


def test_results_on_parts_are_kept_before_the_step_changes_them() -> None:
    parts = range(1, 3), range(4, 5)
    kept, results = KeptResults({"v0_0": SAMPLES, "v1_0": SCALAR}, parts), torch.arange(18.0).reshape(6, 3)
    for number in (0, 1):
        values = {"v0_0": results[3 * number : 3 * number + 3].clone(), "v1_0": torch.tensor(float(number))}
        kept(MicroBatch(number, 3 * number, 3 * number + 3, 6), values)
        values["v0_0"].zero_()
    assert torch.equal(kept.of(parts)["v0_0"], results[[1, 2, 4]])
    assert torch.equal(kept.of([parts[1]])["v0_0"], results[[4]])
    assert kept.of(parts)["v1_0"] == 0


def test_samples_of_parts_are_joined() -> None:
    batch = {"x": torch.arange(6), "names": list("abcdef"), "t": torch.zeros(2, 6), "w": torch.ones(3)}
    found: Any = samples_of_parts(batch, 6, [range(1, 3), range(4, 5)], {"t": 1})
    assert found["x"].tolist() == [1, 2, 4]
    assert (found["names"], tuple(found["t"].shape), len(found["w"])) == (["b", "c", "e"], (2, 3), 3)


def test_parts_turn_and_are_small() -> None:
    assert [_some(range(10, 20), 4, turn) for turn in range(3)] == [range(10, 14), range(14, 18), range(11, 15)]
    assert _some(range(3), 4, 5) == range(3)
    large = TensorSpec(shape=(Affine(1, 0), Affine(0, 1 << 20)), dtype="float32")
    huge = TensorSpec(shape=(Affine(1, 0), Affine(0, 1 << 25)), dtype="float32")
    paired = TensorSpec(shape=(Affine(1, 0), Affine(1, 0)), dtype="float32")
    sizes = [_most_samples({"v": spec}) for spec in (SAMPLES, large, huge, paired, SCALAR)]
    assert sizes == [16, 1, 0, 0, 0]


class Average:
    metric: MulticlassAccuracy

    def __init__(self) -> None:
        self.values = [1.0]


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.net.accuracy, self.net.kept = MulticlassAccuracy(3), [0]
        self.own, self.accuracy = nn.Linear(2, 2), MulticlassAccuracy(3)
        self.table, self.average, self.latest = {"a": [torch.zeros(2)]}, Average(), deque([1])
        self.average.metric = MulticlassAccuracy(3)
        self.array, self.random, self.generator = np.zeros(2), random.Random(0), torch.Generator()
        self.register_buffer("center", torch.zeros(2))


def test_a_copy_of_the_step_has_its_own_belongings_and_shares_parameters() -> None:
    module = Keeping()
    copied: Any = step_copy(module, {"own.bias"})
    copied.table["a"][0] += 1
    copied.average.values.append(2.0)
    copied.latest.append(2)
    copied.array += 1
    copied.center += 1
    copied.random.random()
    torch.rand(2, generator=copied.generator)
    metrics = copied.accuracy, copied.net.accuracy, copied.average.metric
    for metric in metrics:
        metric.update(torch.tensor([1]), torch.tensor([1]))
    copied.net.kept.append(1)
    with torch.no_grad():
        copied.own.bias.zero_()
    fresh = Keeping()
    assert module.table["a"][0].tolist() == [0, 0]
    assert (module.average.values, module.latest, module.array.tolist()) == ([1.0], deque([1]), [0, 0])
    assert module.center.tolist() == [0, 0]
    assert module.random.getstate() == fresh.random.getstate()
    assert torch.equal(module.generator.get_state(), fresh.generator.get_state())
    assert module.accuracy.tp.sum() == module.net.accuracy.tp.sum() == module.average.metric.tp.sum() == 0
    assert module.net.kept == [0]
    assert module.own.bias.abs().sum() > 0
    assert copied.own.weight is module.own.weight
    assert copied.net is not module.net
    assert copied.net[0].weight is module.net[0].weight
