"""The memory of a device."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(device: torch.device) -> int:
    """Bytes of a GPU, or of the host, limited by the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit())


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU, or of the host, that nothing uses; a container's limit may allow less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), _container_limit())


def _container_limit() -> int:
    with suppress(OSError, ValueError):  # the file is one of Linux control groups; it has "max" if there is no limit
        return int(CONTAINER_LIMIT.read_text())
    return 2**63
