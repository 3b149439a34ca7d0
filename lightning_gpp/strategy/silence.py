"""Warnings of Lightning that do not hold for a run in stages, and are shown again afterwards."""

from __future__ import annotations

import warnings
from typing import Final

_OWN_CODE: Final = ".*treespec, LeafSpec.*"
"""Lightning 2.6 on torch >= 2.12 warns about its own code, in every process."""
_SYNC: Final = "It is recommended to use `self.log\\(.*sync_dist=True\\)`"
"""Lightning takes every process group for data parallelism."""


class Silence:
    """Ignores warnings from its creation to `end`, which leaves the filters of others as they are."""

    def __init__(self, num_pipelines: int) -> None:
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", message=_OWN_CODE, category=FutureWarning)
        if num_pipelines == 1:
            warnings.filterwarnings("ignore", message=_SYNC)
        self._added = [each for each in warnings.filters if each not in before]

    def end(self) -> None:
        """Show the warnings again."""
        warnings.filters[:] = [each for each in warnings.filters if each not in self._added]  # type: ignore[index]
        with warnings.catch_warnings():  # whose end lets Python look at its filters again
            pass
