"""What the first run of a step changes is undone, and graphs that saved it stay valid."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gpp.capture import capture_step
from lightning_gpp.capture.kept import kept_by, unmoved, without_effects
from lightning_gpp.errors import CaptureError
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.stages import build
from lightning_gpp.stages.step import Answers
from tests.stages.inprocess import chain_of, split_gradients


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))
        self.calls, self.seen = 0, [1]
        self.state = SimpleNamespace(count=0, lists={"seen": [1]})


CALLS: list[int] = []


class Scaling(nn.Module):
    """Scales its samples by a number that it counts."""

    def __init__(self, scale: Callable[[Scaling], float]) -> None:
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(2, 2), nn.Linear(2, 1), scale
        self.kept, self.generator = SimpleNamespace(calls=[]), torch.Generator().manual_seed(0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.body(batch * self.scale(self))).square().mean()


def of_all_calls(module: Scaling) -> float:
    CALLS.append(1)
    return float(len(CALLS))


def of_calls(module: Scaling) -> float:
    module.kept.calls.append(1)
    return float(len(module.kept.calls))


def drawn(module: Scaling) -> float:
    return 1.0 + torch.rand(2, generator=module.generator)[0].item()


def trained(scale: Callable[[Scaling], float]) -> float:
    torch.manual_seed(0)
    batch, module = torch.randn(8, 2), Scaling(scale)
    captured = capture_step(module, batch)
    return split_gradients(module, captured, chain_of(captured, [["body"], ["head"]], 4), batch)


def test_the_second_run_for_a_micro_batch_repeats_the_first() -> None:
    torch.manual_seed(0)
    batch, module = torch.randn(8, 2), Scaling(of_calls)
    parts = [module.head(module.body(part * scale)) for part, scale in zip(batch.split(4), (1, 2), strict=True)]
    assert trained(of_calls) == pytest.approx(torch.cat(parts).square().mean().item())


def test_inputs_that_depend_on_what_the_step_changes_outside_of_the_module_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)time it gave 'body' other inputs.*attributes of the module"):
        trained(of_all_calls)


def test_inputs_drawn_for_several_micro_batches_in_turn_are_refused() -> None:
    batch, module = torch.randn(8, 2), Scaling(drawn)
    captured = capture_step(module, batch)
    step = build(captured, chain_of(captured, [["body"], ["head"]], 4), module).step
    step.begin(batch, lambda part: module.training_step(part, 0), 0)
    parts = [MicroBatch(0, 0, 4, 8), MicroBatch(1, 4, 8, 8)]
    for part in parts:
        step.inputs(part)
    step.run(parts[0], {})
    with pytest.raises(CaptureError, match="(?s)time it gave 'body' other inputs.*torch.rand"):
        step.run(parts[1], {})


def test_attributes_lists_and_buffers_are_as_before() -> None:
    module = Keeping()
    with without_effects([module], [module.count], kept_by([module])):
        module.count.add_(1)
        module.count.data.add_(1)
        module.mean = module.mean + 1
        module.calls, module.new = 1, 2
        module.seen.append(2)
        module.state.count += 1
        module.state.lists["seen"].append(2)
    assert not module.count.any()
    assert not module.mean.any()
    assert (module.calls, module.seen, hasattr(module, "new")) == (0, [1], False)
    assert (module.state.count, module.state.lists) == (0, {"seen": [1]})


def test_a_graph_that_has_saved_a_buffer_stays_valid() -> None:
    module, weight = Keeping(), torch.ones(3, requires_grad=True)
    result = (weight * module.count).sum()
    with without_effects([module], [module.count], kept_by([module])):
        pass
    result.backward()


def test_random_generators_are_restored() -> None:
    sources = np.random.default_rng(0), np.random.RandomState(1), random.Random(2), torch.Generator()
    with unmoved(sources):
        first = _draw(*sources)
    assert _draw(*sources) == first


def _draw(one: np.random.Generator, two: np.random.RandomState, three: random.Random, four: torch.Generator) -> Any:
    return one.random(), two.rand(), three.random(), torch.rand((), generator=four).item()


def test_parts_of_a_container_whose_calls_are_answered_are_called_themselves() -> None:
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2)
    with Answers([net]).given(lambda *_: "answer"):
        assert net(x) == "answer"
        assert torch.equal(net[:1](x), net[0](x))
    assert torch.equal(net(x), net[0](x).tanh())
