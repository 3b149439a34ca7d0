"""A checkpoint as a folder, in Lightning's layout: every rank writes what it holds, and nothing is gathered.

    NAME/__0_0.distcp    tensors of rank 0, written by torch.distributed.checkpoint
    NAME/__1_0.distcp    those of rank 1, ...
    NAME/meta.pt         everything else, as in an ordinary checkpoint
    NAME/.metadata       which tensor is where

The folder is written as `.saving/NAME`, and gets its name when all ranks have written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from lightning_gpp.checkpoints.atomic import being_written, part_of, present, put, reason, synchronise
from lightning_gpp.checkpoints.file import not_written
from lightning_gpp.errors import CheckpointError

META: Final = "meta.pt"
METADATA: Final = ".metadata"

Writers = dist.ProcessGroup | None
"""The ranks that write together, on the CPU; None is a process alone."""


def is_folder(path: str | Path) -> bool:
    """True for a whole checkpoint folder."""
    path = present(Path(path))
    return all((path / name).is_file() for name in (META, METADATA))


def write_folder(tensors: Mapping[str, Any], meta: bytes, path: Path, group: Writers) -> None:
    """Write a checkpoint folder, which is complete as soon as it has its name. All ranks of the group call it.

    Args:
        tensors: a tree of the tensors that this rank saves (shards as DTensors), and of other values that it alone has.
        meta: content of `meta.pt`; used on the first rank.
        path: the folder, on a file system that all ranks share.
        group: the ranks that write.

    Raises:
        CheckpointError: on all ranks; the file system of one of them is full, or does not allow it. Nothing new stays
            there.
    """
    try:
        with _part(path, group) as part:
            if group is None:
                _write_alone(dict(tensors), _Writer(part))
            else:
                save(dict(tensors), storage_writer=_Writer(part), process_group=group)
            _on_first(group, lambda: _complete(part, meta, path))
    except OSError as error:
        raise not_written(path, reason(error)) from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise not_written(path, f"{reason(cause)} (rank {rank})") from error


class _Writer(FileSystemWriter):
    """Writes a rank's file. Its errors are pickled for the other ranks, which loses their causes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        try:
            written: Future[list[Any]] = super().write_data(plan, planner)
            return written
        except (OSError, RuntimeError) as error:
            raise OSError(reason(error)) from error


def _write_alone(tensors: dict[str, Any], writer: FileSystemWriter) -> None:
    """Do what `save` does for a group, which for a process alone warns that it has none."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


@contextmanager
def _part(path: Path, group: Writers) -> Iterator[Path]:
    """A new folder for all ranks, which the first one makes; after an error it is removed."""
    with ExitStack() as stack:
        _on_first(group, lambda: stack.enter_context(being_written(path)).mkdir())
        _check_shared(part_of(path), group)
        yield part_of(path)


def _complete(part: Path, meta: bytes, path: Path) -> None:
    with (part / META).open("xb") as file:
        file.write(meta)
    synchronise(part / META)
    synchronise(part)
    put(part, path)


# -- ranks ------------------------------------------------------------------------------------------------------------


def _is_first(group: Writers) -> bool:
    return group is None or dist.get_rank(group) == 0


def _on_first(group: Writers, action: Callable[[], object]) -> None:
    """Run an action on the first rank; its error is raised on all ranks."""
    outcome: list[BaseException | None] = [None]
    if _is_first(group):
        try:
            action()
        except OSError as error:
            outcome = [error]
    if group is not None:
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[0] is not None:
        raise outcome[0]


def _check_shared(part: Path, group: Writers) -> None:
    if group is None:
        return
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, part.is_dir(), group=group)
    if not all(found):
        raise CheckpointError(
            f"The folder {part.parents[1]} of rank 0 is not there on rank {found.index(False)}. A sharded checkpoint "
            "needs a file system that all ranks share. Choose another folder."
        )
