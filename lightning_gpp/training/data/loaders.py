"""Data loaders of pipelines, which divide samples as under DDP.

Rank and world size of data parallelism are those of pipelines, not of processes. Samplers and data sets that were
written for DDP ask torch.distributed for these numbers. In one pipeline of four processes one process loads data, so a
data set that yields every fourth sample would lose the other three quarters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.mesh import Mesh
from lightning_gpp.user_code import is_user_code, own_attributes
from lightning_gpp.wording import counted, warn


def warn_of_others(before: int, now: int) -> None:
    """Tell the user that a resumed run has larger or smaller mini-batches than before, as it has other pipelines."""
    if before != now:
        warn(
            f"The checkpoint was trained with {before} pipelines, each with mini-batches of its own, and this run has "
            f"{now}: the mini-batch of a step is {now / before:g} times as large. Divide the data loader's batch size "
            "by as much.",
        )


@contextmanager
def data_parallel_world(mesh: Mesh) -> Iterator[None]:
    """Inside, the processes that load data are the world: that of torch.distributed, and of RANK and WORLD_SIZE.

    Workers of data loaders keep the world in which they start.
    """
    whole = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(zip(_VARIABLES, (str(mesh.pipeline), str(mesh.num_pipelines)), strict=True))
    try:
        with mesh.peers():
            yield
    finally:
        for name, value in whole.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_VARIABLES: Final = ("RANK", "WORLD_SIZE")


def read_in_world(loader: Iterable[Any], mesh: Mesh) -> Iterator[Any]:
    """The mini-batches of a loader, which starts its workers and loads data in the world of data parallelism."""
    with data_parallel_world(mesh):
        batches = iter(loader)
    while True:
        with data_parallel_world(mesh):
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


_END: Final = object()

# --- samplers


def divide_samples(loader: Any, mesh: Mesh, wanted: Mapping[str, int]) -> None:
    """Let the user's distributed samplers divide the samples among pipelines.

    Args:
        loader: a data loader.
        mesh: the mesh of this process.
        wanted: `num_replicas` and `rank` of samplers on this process.

    Raises:
        ConfigError: a sampler divides them in another way, and has more numbers than those that torch's sampler has.
    """
    if wanted["num_replicas"] > 1 and mesh.own_process == 0 and type(getattr(loader, "sampler", None)) in _UNDIVIDED:
        warn(
            f"A data loader does not divide the samples among the {mesh.num_pipelines} pipelines "
            "(use_distributed_sampler=False): each of them has all of them, unless its data set is a part. Leave "
            "this argument out.",
        )
    if mesh.num_processes == wanted["num_replicas"]:
        return
    for sampler in _distributed_samplers(loader):
        found = {name: getattr(sampler, name) for name in ("num_replicas", "rank")}
        if found == wanted or found["num_replicas"] == 1:
            continue
        meant = found["num_replicas"] in (mesh.num_processes, wanted["num_replicas"])
        if not meant or type(sampler).__init__ is not DistributedSampler.__init__:
            raise ConfigError(f"{_divides(sampler, mesh)} Samples would be lost, or used twice. {_REMEDY}")
        _construct_anew(sampler, wanted)
        if mesh.own_process == 0:
            warn(
                f"{_divides(sampler, mesh, found['num_replicas'])} It divides them among pipelines now. {_REMEDY}",
            )


def _distributed_samplers(loader: Any) -> Iterator[Any]:
    """The samplers of a loader that divide samples among ranks, also those inside of batch samplers and wrappers."""
    open_parts, seen = [loader], set[int]()
    while open_parts:
        part = open_parts.pop()
        attributes = own_attributes(part) or {}
        if id(part) in seen or not attributes:
            continue
        seen.add(id(part))
        if all(isinstance(attributes.get(name), int) for name in ("num_replicas", "rank")):
            yield part
        open_parts += [attributes[name] for name in ("batch_sampler", "sampler") if name in attributes]


_UNDIVIDED: Final = (SequentialSampler, RandomSampler)


def _construct_anew(sampler: Any, wanted: Mapping[str, int]) -> None:
    """Give a sampler other numbers; the object stays, because its user may set its epoch."""
    epoch, settings = sampler.epoch, {name: getattr(sampler, name) for name in ("shuffle", "seed", "drop_last")}
    numbers: dict[str, Any] = {**wanted, **settings}
    DistributedSampler.__init__(sampler, sampler.dataset, **numbers)
    sampler.epoch = epoch


def _divides(sampler: Any, mesh: Mesh, num_replicas: int | None = None) -> str:
    number = sampler.num_replicas if num_replicas is None else num_replicas
    pipelines = counted(mesh.num_pipelines, "pipeline")
    return (
        f"{type(sampler).__name__} of a data loader divides the samples among num_replicas={number}, but not processes "
        f"divide data here, pipelines do: the {mesh.num_processes} processes are {pipelines}."
    )


_REMEDY: Final = "Leave the sampler out: Lightning makes the right one."


# --- user code that asks for the number of processes


def tell_of_pipelines(mesh: Mesh) -> bool:
    """Warn if code of the user reads the number of processes, which does not divide data or scale rates.

    Called by a property that users read; returns whether there was something to tell.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_name == "world_size" and frame.f_back is not None:  # properties that pass it on
        frame = frame.f_back
    if mesh.num_processes == mesh.num_pipelines or not is_user_code(frame.f_code.co_filename):
        return False
    if mesh.own_process == 0:
        warn(
            f"world_size is the number of processes, {mesh.num_processes} ({frame.f_code.co_filename}:{frame.f_lineno}"
            f"), but data are divided among {counted(mesh.num_pipelines, 'pipeline')}. To divide samples or scale a "
            "learning rate, use num_replicas and rank of self.trainer.distributed_sampler_kwargs, which are right "
            "under DDP, too; the __iter__ of an IterableDataset may ask torch.distributed, whose world is then that of "
            "the pipelines.",
            stacklevel=3,
        )
    return True
