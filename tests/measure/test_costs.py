"""Measured costs: what is measured, how often, and what becomes of it. Nothing here depends on the machine's speed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.cluster import DEVICES
from lightning_gpp.costs.measured import MeasuredCosts
from lightning_gpp.costs.model import CostModel
from lightning_gpp.errors import ConfigError
from lightning_gpp.measure.costs import measure_costs
from lightning_gpp.measure.timing import BlockTimer
from lightning_gpp.runtime.stage import MicroBatch

CPU = DEVICES["cpu"]
WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() + x


class Model(L.LightningModule):
    """An embedding, layers, a head that is tied to the embedding, a metric, dropout and a buffer that changes."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(self.dropout(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.mean(loss.detach())
        return loss


def batch(num_samples: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.arange(num_samples) % 7
    return x, x


def captured(module: nn.Module) -> Capture:
    return capture_step(module, batch())


def seconds_of(costs: CostModel, capture: Capture, num_samples: int, prefix: str = "") -> list[float]:
    """Forward, input gradient, weight gradient of all operators of a module together."""
    found = [costs.seconds(op, num_samples, CPU) for op in capture.graph if op.module.startswith(prefix)]
    return [sum(part) for part in zip(*found, strict=True)]


@pytest.fixture
def measure() -> Any:
    def run(module: nn.Module, sizes: tuple[int, ...] = (2, 8), **options: Any) -> MeasuredCosts:
        options = {"budget": 0.0, "device": CPU, **options}
        return measure_costs(captured(module), module, batch(), sizes=sizes, **options)

    return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every block takes a second per parameter and sample, forwards; what was timed, as (parameters, samples)."""
    timed: list[tuple[int, int]] = []

    def seconds(self: BlockTimer, stage: Any, values: Any, micro_batch: MicroBatch) -> tuple[float, float]:
        numbers = {id(p): p.numel() for part in stage.parts for p in part.parameters(recurse=False) if not p.is_meta}
        timed.append((sum(numbers.values()), micro_batch.num_samples))
        forward = float(sum(numbers.values()) * micro_batch.num_samples)
        return forward, 1.5 * forward

    monkeypatch.setattr(BlockTimer, "seconds", seconds)
    return timed


@pytest.fixture
def forwards() -> Iterator[list[int]]:
    """The numbers of samples that any Layer was called with."""
    calls: list[int] = []
    forward = Layer.forward
    Layer.forward = lambda self, x: (calls.append(len(x)), forward(self, x))[1]  # type: ignore[method-assign]
    yield calls
    Layer.forward = forward  # type: ignore[method-assign]


def test_equal_blocks_are_timed_once(measure: Any, clock: list[tuple[int, int]]) -> None:
    measure(Model(num_layers=1))
    once = sorted([*((n, 2) for n in (0, 8, 20, 28, 28)), *((n, 8) for n in (0, 8, 20, 28, 28))])
    assert sorted(clock) == once
    clock.clear()
    measure(Model(num_layers=5))
    assert sorted(clock) == once


def test_other_operators_shapes_and_required_gradients_are_other_blocks(
    measure: Any, clock: list[tuple[int, int]]
) -> None:
    def differing(change: Callable[[Model], object]) -> int:
        clock.clear()
        model = Model()
        change(model)
        measure(model, sizes=(2,))
        return len(clock) - 5

    assert differing(lambda _: None) == 0
    assert differing(lambda model: model.layers[1].linear.weight.requires_grad_(False)) == 1
    assert differing(lambda model: model.layers.insert(1, nn.Linear(WIDTH, WIDTH))) == 1
    assert differing(lambda model: model.layers.insert(1, nn.Sequential(Layer(), nn.Tanh()))) == 1


def test_costs_add_up(measure: Any, clock: list[tuple[int, int]]) -> None:
    """Forward seconds are parameters x samples on this clock; the tied weight is in two blocks."""
    one, two = Model(num_layers=1), Model(num_layers=2)
    costs = {1: measure(one), 2: measure(two)}
    for samples in (1, 2, 5, 8):
        layer, _, _ = seconds_of(costs[2], captured(two), samples, "layers.0")
        assert layer == pytest.approx(20 * samples)
        assert seconds_of(costs[2], captured(two), samples, "layers") == pytest.approx(
            [2 * part for part in seconds_of(costs[1], captured(one), samples, "layers")]
        )
        assert sum(seconds_of(costs[2], captured(two), samples)) == pytest.approx((28 + 40 + 8 + 28) * samples * 2.5)


def test_nothing_of_the_users_changes(measure: Any) -> None:
    model, threads = Model(), torch.get_num_threads()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), torch.rand(1).item()
    random.seed(1)
    torch.manual_seed(1)
    measure(model)
    assert (random.random(), torch.rand(1).item()) == expected
    assert torch.get_num_threads() == threads
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.embedding.weight
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.mean.weight == 0
    assert "log" not in vars(model)


def test_a_model_on_the_meta_device_takes_memory_block_by_block(measure: Any, forwards: list[int]) -> None:
    with torch.device("meta"):
        model = Model()
    model.mean = MeanMetric()
    costs = measure(model)
    assert forwards
    assert seconds_of(costs, captured(Model()), 8, "layers")[0] > 0
    assert all(parameter.is_meta for parameter in model.parameters())


class LogsInside(Model):
    """A forward that logs cannot be cut."""

    def forward(self, x: Tensor) -> Tensor:
        self.log("inside", 0.0)
        return super().forward(x)


def test_what_cannot_be_cut_is_one_block(measure: Any, clock: list[tuple[int, int]]) -> None:
    costs = measure(LogsInside(num_layers=1), sizes=(4,))
    assert sorted(clock) == [(0, 4), (28 + 20 + 8, 4)]
    assert seconds_of(costs, captured(LogsInside(num_layers=1)), 4)[0] == pytest.approx(56 * 4)


def test_a_block_runs_in_the_context() -> None:
    seen = []

    class Typed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            if type(y) is Tensor:  # not while it is captured
                seen.append(y.dtype)
            return y

    def low() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    model = Model()
    model.layers = nn.ModuleList([Typed()])
    taken = capture_step(model, batch(), context=low)
    costs = measure_costs(taken, model, batch(), device=CPU, sizes=(2,), context=low)
    assert set(seen) == {torch.bfloat16}
    assert seconds_of(costs, taken, 2)[0] > 0


@pytest.mark.parametrize("sizes", [(), (0, 4), (4, 9)])
def test_sizes_must_fit_the_batch(measure: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="sizes from 1 to 8, the samples of the batch"):
        measure(Model(), sizes=sizes)


def test_a_batch_without_values_is_refused() -> None:
    model = Model()
    nothing = tuple(tensor.to("meta") for tensor in batch())
    with pytest.raises(ConfigError, match="a batch on the meta device"):
        measure_costs(captured(model), model, nothing, device=CPU, sizes=(2,))
