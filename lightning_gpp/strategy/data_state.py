"""Changes that reading a mini-batch makes in users' objects are undone: counters, positions, own random generators.

The first mini-batch is read at set-up, and once more by the loop. Samplers that count epochs, and data with generators
for augmentation, would be one ahead in all of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

from lightning_gpp.capture.left_tensors import unchanged
from lightning_gpp.capture.own_streams import unmoved
from lightning_gpp.capture.shared_objects import holders_around


@contextmanager
def as_before(*values: Any) -> Iterator[None]:
    """Restore afterwards what these objects, and those inside of them, keep between calls."""
    holders, generators = holders_around(values, apart=(pl.Trainer,))
    with unchanged(holders), unmoved(generators):
        yield
