"""Changes that reading a mini-batch makes in users' objects are undone: counters, positions, own random generators.

The first mini-batch is read at set-up, and once more by the loop. Samplers that count epochs, and data with generators
for augmentation, would be one ahead in all of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

from lightning_gpp.capture.kept import Kept, unchanged
from lightning_gpp.capture.own_streams import unmoved


@contextmanager
def as_before(*values: Any) -> Iterator[None]:
    """Restore afterwards what these objects, and those inside of them, keep between calls."""
    kept = Kept(values, libraries=True, apart=(pl.Trainer,))
    with unchanged(kept.holders), unmoved(kept.generators):
        yield
