"""How many bytes a device has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(device: torch.device) -> int:
    """All of a GPU's memory, or what the host (or the container, if it has a limit) lets this process use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit())


def _container_limit() -> int:
    unlimited = 2**63
    try:
        return int(CONTAINER_LIMIT.read_text())
    except (OSError, ValueError):  # no such file outside Linux control groups; the word "max" where there is no limit
        return unlimited
