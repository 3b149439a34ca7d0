"""The random streams of the process that user code draws from: Python's, NumPy's and torch's on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the streams when the context ends, whatever was drawn inside."""
    python, numpy, generator = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(generator)


def seed_streams(seed: int) -> None:
    """Seed all three streams with `seed`, a number of up to 63 bits."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)
