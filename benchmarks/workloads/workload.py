"""Workloads: a model and an example batch to build, and the source of their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L

Built = tuple[L.LightningModule, Any]
"""A model and an example batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model to plan for.

    `build` makes the model and an example batch of `batch_size` samples; under `torch.device("meta")` neither takes
    memory. `source` states the origin of its sizes.
    """

    name: str
    build: Callable[[], Built]
    batch_size: int
    source: str
