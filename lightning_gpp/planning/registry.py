"""Partitioners by name. A partitioner is a function from a captured model and a number of devices to a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lightning_gpp.costs.roofline import CPU, Device, Link, link_of
from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a partitioner is asked for.

    Args:
        num_devices: of one pipeline replica.
        batch_size: samples of the mini-batch of one pipeline replica.
        num_micro_batches: or `micro_batch_size`, or neither: twice the depth of the stage graph.
        schedule: name written into the plan.
        model: fingerprint written into the plan.
        device: speed of each device.
        link: between any two devices; by default that of the kind of device.
    """

    num_devices: int
    batch_size: int
    num_micro_batches: int | None = None
    micro_batch_size: int | None = None
    schedule: str = "1f1b"
    model: str = ""
    device: Device = CPU
    link: Link | None = None

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.batch_size < 1:
            raise ConfigError(
                f"A plan needs at least 1 device and 1 sample, got {self.num_devices} devices (trainer.devices) and a "
                f"mini-batch of {self.batch_size} samples."
            )

    @property
    def connection(self) -> Link:
        return self.link or link_of(self.device)


Partitioner = Callable[[OperatorGraph, Request], Plan]

_PARTITIONERS: Final[dict[str, Partitioner]] = {}


def register(name: str) -> Callable[[Partitioner], Partitioner]:
    """Make a partitioner available as `strategy.partitioner=name`.

    Raises:
        ConfigError: the name is taken.
    """

    def add(partitioner: Partitioner) -> Partitioner:
        if name in _PARTITIONERS:
            raise ConfigError(f"A partitioner named {name!r} is registered already; choose another name.")
        _PARTITIONERS[name] = partitioner
        return partitioner

    return add


def partitioner_names() -> tuple[str, ...]:
    """All names that `strategy.partitioner` accepts."""
    return tuple(sorted(_PARTITIONERS))


def partition(name: str, graph: OperatorGraph, request: Request) -> Plan:
    """A plan by the partitioner of that name.

    Raises:
        ConfigError: there is no such partitioner, or the micro-batches do not fit the mini-batch.
        PlanError: the model does not fit the devices.
    """
    return partitioner_of(name)(graph, request)


def partitioner_of(name: str) -> Partitioner:
    """The partitioner registered under a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _PARTITIONERS:
        raise ConfigError(
            f"strategy.partitioner={name!r} does not exist. Choose one of: {', '.join(partitioner_names())}; or add "
            "your own with @lightning_gpp.planning.register(...) before the trainer starts."
        )
    return _PARTITIONERS[name]
