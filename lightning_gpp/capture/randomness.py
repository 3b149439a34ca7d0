"""The process's random streams that user code draws from: Python's, NumPy's and torch's on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def undisturbed(seed: int | None = None) -> Iterator[None]:
    """Within the context the streams start from `seed` (None: where they are); afterwards they go on as before."""
    python, numpy, generator = random.getstate(), np.random.get_state(), torch.get_rng_state()
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(generator)
