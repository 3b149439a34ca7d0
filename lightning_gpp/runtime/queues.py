"""Hardware queues: a GPU serves all streams of a process through a few of them, which must not hold up each other.

A receive is posted before its message is sent, and occupies its stream until then. Streams that share a hardware queue
wait for each other, although nothing in the program says so. So a device might wait in front of a send for a message
that its receiver can send only after it has got that one, and no proof about the program would exclude it. CUDA opens 8
queues by default; as many as `CUDA_DEVICE_MAX_CONNECTIONS` says when a process uses its first GPU, at most 32.
(NVIDIA, CUDA C++ Programming Guide, "Environment Variables"; that streams of several communicators need not progress
independently: github.com/NVIDIA/nccl/issues/522 and 783.)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from lightning_gpp.errors import ConfigError

VARIABLE: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST: Final = 32
"""The most queues that a GPU has."""

USUAL: Final = 8
"""Queues without the variable."""

OTHERS: Final = 2
"""Streams besides those of messages that wait for other devices: computing, and sums of gradients."""


def open_queues() -> None:
    """Ask CUDA for as many queues as there are, unless the user has decided, or this process uses a GPU already."""
    if not torch.cuda.is_initialized():
        os.environ.setdefault(VARIABLE, str(MOST))


def streams_of(pairs: Iterable[tuple[int, int]], device: int, members: Sequence[int]) -> int:
    """Number of streams that a device needs which sends and receives between these directed pairs of devices.

    With several members it is that of the first one: members have a stream for what they tell each other, and one for
    each process that receives from them. `members`: the members of each device.
    """
    known, own = set(pairs), members[device]
    sent = sum(-(-members[dst] // own) for src, dst in known if src == device)
    received = sum(dst == device for _, dst in known)
    return OTHERS + (own > 1) + sent + received


def check_queues(pairs: Iterable[tuple[int, int]], members: Sequence[int], environment: Mapping[str, str]) -> None:
    """Refuse fewer queues than a device of the plan has streams.

    Args:
        pairs: directed pairs of devices between which messages travel over NCCL.
        members: number of processes of each device of the plan.
        environment: the process's environment.

    Raises:
        ConfigError: CUDA_DEVICE_MAX_CONNECTIONS is too small, or no number.
    """
    text, known = environment.get(VARIABLE, f"{USUAL}"), tuple(pairs)
    needed, device = max((streams_of(known, device, members), -device) for device in range(len(members)))
    if not text.isdecimal() or int(text) < min(needed, MOST):
        raise ConfigError(
            f"{VARIABLE}={text}, but device {-device} of the plan has {needed} streams: for computing, for sums of "
            "gradients, and one for each neighbour and direction. With fewer hardware queues than streams, ranks could "
            f"wait for each other for ever. Set the variable to {MOST} before the process uses a GPU."
        )
    if needed > MOST:
        warnings.warn(
            f"Device {-device} of the plan has {needed} streams, but a GPU has at most {MOST} hardware queues for "
            "them. Streams that share a queue wait for each other, so ranks could wait for ever. Give the device fewer "
            "neighbours: fewer replicas (strategy.max_replicas), or fewer branches that join (strategy.stages).",
            stacklevel=2,
        )
