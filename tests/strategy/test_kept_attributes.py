"""What the step keeps in attributes is on all ranks, before hooks, optimizers and schedulers may read it."""

from __future__ import annotations

import pickle
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_gpp.training.mirrored_state import MirroredState


class Part(nn.Module):
    """A part of a module."""


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Part()
        self.number, self.text, self.none, self.numbers = 1.0, "a", None, [1, 2]
        self.tensor, self.array, self.large = torch.zeros(2), np.zeros(2), torch.zeros(1 << 15)
        self.inside, self.tensors = {"a": 1}, [torch.ones(1)]
        self.recent = deque([1.0], maxlen=2)


def step(module: Any) -> None:
    module.number, module.text, module.none, module.large = 2.0, "b", 3, module.large + 1
    module.numbers.append(3)
    module.tensor.add_(1)
    module.array += 1
    module.inside["b"], module.made = 2, torch.ones(2)
    module.tensors.append(torch.ones(1))
    module.recent.append(2.0)
    module._private, module.layer.public, module.layer._installed = 1, 2, True


def test_values_are_found_and_taken_over() -> None:
    module, other = Keeps(), Keeps()
    control: Any = SimpleNamespace(runs_step=True)  # what is asked here needs no other rank
    mirrored, there = (MirroredState(each, control, torch.device("cpu")) for each in (module, other))
    mirrored.begin()
    assert not mirrored.end()
    step(module)
    changed = mirrored.end()
    before = other.numbers
    there.take(pickle.loads(pickle.dumps(changed)))
    assert not changed.keys() & {("", "large"), ("", "tensors"), ("", "layer"), ("", "array")}
    assert (other.number, other.text, other.none, other.numbers) == (2.0, "b", 3, [1, 2, 3])
    assert other.numbers is before
    assert (other._private, other.layer.public) == (1, 2)
    assert not hasattr(other.layer, "_installed")  # a layer's own affair where it computes
    assert (other.tensor.tolist(), other.made.tolist()) == ([1, 1], [1, 1])
    assert (other.inside, list(other.recent)) == ({"a": 1, "b": 2}, [1.0, 2.0])
    mirrored.begin()
    assert not mirrored.end()
