"""Random generators in attributes of the module can be set back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_gpp.capture.kept import unmoved


def test_generators_are_restored() -> None:
    sources = np.random.default_rng(0), np.random.RandomState(1), random.Random(2), torch.Generator()
    with unmoved(sources):
        first = _draw(*sources)
    assert _draw(*sources) == first


def _draw(one: np.random.Generator, two: np.random.RandomState, three: random.Random, four: torch.Generator) -> Any:
    return one.random(), two.rand(), three.random(), torch.rand((), generator=four).item()
