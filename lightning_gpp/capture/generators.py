"""Random generators of the user's own in attributes of the module: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomSource = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A random generator of the user's own."""


def state_of(generator: RandomSource) -> Any:
    """The state of a generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: RandomSource, state: Any) -> None:
    """Give a generator a state again."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def unmoved(generators: Sequence[RandomSource]) -> Iterator[None]:
    """Restore generators afterwards."""
    before = list(map(state_of, generators))
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            set_state(generator, state)
