"""Changes that reading a mini-batch makes in users' objects are undone: counters, positions, own random generators.

The first mini-batch is read at set-up, and once more by the loop. Samplers that count epochs, and data with generators
for augmentation, would be one ahead in all of training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np

from lightning_gpp.capture.left_tensors import unchanged
from lightning_gpp.capture.shared_objects import RandomSource, holders_around


@contextmanager
def as_before(*values: Any) -> Iterator[None]:
    """Restore afterwards what these objects, and those inside of them, keep between calls."""
    holders, generators = holders_around(values, apart=(pl.Trainer,))
    states = [(generator, _state(generator)) for generator in generators]
    with unchanged(holders):
        try:
            yield
        finally:
            for generator, state in states:
                _set_state(generator, state)


def _state(generator: RandomSource) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: RandomSource, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
