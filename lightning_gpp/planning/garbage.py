"""Python's garbage collector, for work that makes many objects and no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_RARELY: Final = 500_000
"""New objects until the collector looks for cycles; Python's own threshold is 700."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Inside, the collector runs rarely, unless it is off.

    It visits all objects each time that their number has grown by a quarter, as programs of many actions let it.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(_RARELY, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
