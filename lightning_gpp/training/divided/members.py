"""Devices with different numbers of members: what all processes of a job agree on before its module is captured.

A module is divided on every device by the device's own members. What is not cut into stages must be the same
everywhere, though, and devices with one member, which divide nothing, have to know what others divide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from torch.distributed.device_mesh import DeviceMesh

from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.plan import Plan
from lightning_gpp.training.control import Control
from lightning_gpp.training.divided.parallel_regions import Regions, outermost
from lightning_gpp.training.divided.tensor_parallel import TensorParallel


def agreed_division(parallel: TensorParallel | None, mesh: DeviceMesh, control: Control) -> TensorParallel | None:
    """The division on this device; where one process has everything, that of the largest device, of which it has all.

    All processes call this together.

    Args:
        parallel: what the members of this device have divided.
        mesh: the members of this device.
        control: the side channel of this process.

    Returns:
        None on all processes if a device with several members has divided nothing.
    """
    several = control.num_members > 1
    mine = parallel.divisions if parallel is not None and several else None
    found = [each for each in control.gather_all((control.num_members, mine)) if each[0] > 1]
    if any(divisions is None for _, divisions in found):
        return None
    _, divisions = max(found, key=lambda each: each[0])
    return parallel if several else TensorParallel(mesh, divisions, {})


def agreed_regions(control: Control, find: Callable[[], Regions]) -> Regions:
    """The regions of all devices together. All processes call this together.

    Raises:
        GPPError: on all processes, what `find` raises on some.
    """
    outcome: Regions | GPPError
    try:
        outcome = find()
    except GPPError as error:
        outcome = error
    outcomes = control.gather_all(outcome)
    for refused in (each for each in outcomes if isinstance(each, GPPError)):
        raise refused.with_traceback(None)
    return outermost({path for regions in outcomes for path in regions})


def check_tied(plan: Plan, uses: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError if stages with different numbers of members train the same parameter.

    `uses`: the stages that use each parameter.
    """
    for name, numbers in uses.items():
        stages = [plan.stages[number] for number in numbers]
        for one, other in pairwise(stages):
            if one.tensor_parallel_size != other.tensor_parallel_size:
                raise ConfigError(
                    f"The stages {one.name!r} and {other.name!r} use the same parameter, {name!r}, but have "
                    f"tensor_parallel_size={one.tensor_parallel_size} and {other.tensor_parallel_size}, so its "
                    "gradients could not be added up. Give both the same number, or put all that share it into one "
                    "stage (strategy.stages)."
                )
