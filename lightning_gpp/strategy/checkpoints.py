"""Lightning's way to checkpoints: as one file or as a folder, at once or in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging

from lightning_gpp.checkpoints.atomic import present, remove
from lightning_gpp.checkpoints.file import reading, write_file
from lightning_gpp.checkpoints.folder import META, is_folder, write_folder
from lightning_gpp.checkpoints.layout import KEY, dumped, joined, split
from lightning_gpp.checkpoints.saver import Saver
from lightning_gpp.checkpoints.stored import Folder
from lightning_gpp.errors import CheckpointError, ConfigError
from lightning_gpp.failure.report import is_consequence
from lightning_gpp.reports import plan_table
from lightning_gpp.runtime.named_tensors import tensors_of
from lightning_gpp.training.control import Control
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.options import Options
from lightning_gpp.training.states import fill
from lightning_gpp.training.tensors.foreign import pickled_as

SHARDED_ABOVE: Final = 4 * 2**30
"""Bytes of parameters and buffers of the largest model that is saved as one file, unless the user chooses. With Adam
rank 0 needs three times as much host memory for that.
"""


@contextmanager
def saved_by_all(*, ended: bool) -> Iterator[None]:
    """Inside, all ranks collect a checkpoint. After the run (`ended`) nobody watches them: one alone is told here."""
    try:
        yield
    except RuntimeError as error:
        if not ended or not is_consequence(error):
            raise
        raise CheckpointError(
            "The checkpoint cannot be collected, because other ranks have ended: all of them hold a part of it. Let "
            "every rank call trainer.save_checkpoint, also after fit; leave out conditions such as "
            "`trainer.is_global_zero`."
        ) from error


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a file or folder beside its target and renames it; URLs are left to Lightning.

    Lightning makes the file in memory, writes it to the temporary folder, which may be another file system, and moves
    it: a kill during the move leaves part of a file under the target's name.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointError: it cannot be written; an older one of this name is as it was.
        """
        if _is_url(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            write_file(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; tensors of a folder are read when they are asked for.

        Raises:
            CheckpointError: it is damaged.
        """
        if _is_url(path):
            return super().load_checkpoint(path, *args, **kwargs)
        whole = is_folder(path)
        file = present(Path(path)) / META if whole else Path(path)
        with reading(file):
            checkpoint = super().load_checkpoint(file, *args, **kwargs)
            return joined(Folder(path), checkpoint) if whole else checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or folder, which nobody takes for a checkpoint as soon as parts are missing."""
        if _is_url(path):
            super().remove_checkpoint(path)
        else:
            remove(Path(path))


class Checkpoints:
    """Saves and removes the checkpoints of a strategy, each after the one before. All ranks call its methods together.

    Args:
        options: options of the strategy.
        io: returns what writes and removes files, which Lightning may replace.
    """

    def __init__(self, options: Options, io: Callable[[], CheckpointIO]) -> None:
        self._options, self._io = options, io
        self._saver = Saver(background=False)
        self._group: dist.ProcessGroup | None = None
        self._only_files = False

    def begin(self, callbacks: Sequence[object] = ()) -> None:
        """Save in the background from now on, if the user wants that.

        `callbacks`: those of the trainer; weights that they average are saved in files only.

        Raises:
            ConfigError: there are such weights, and checkpoints are to be folders.
        """
        self._saver.background, self._group = self._options.async_save, None
        self._only_files = any(isinstance(callback, WeightAveraging) for callback in callbacks)
        if self._only_files and self._options.state_dict_type == "sharded":
            raise ConfigError(
                "strategy.state_dict_type=sharded does not go together with the callback WeightAveraging, whose "
                "averaged weights folders cannot have yet. Set strategy.state_dict_type=full."
            )

    def sharded(self, engine: Engine | None) -> bool:
        """Decide whether checkpoints are folders, to which every rank writes what it holds."""
        kind = self._options.state_dict_type
        if engine is None or kind != "auto":
            return engine is not None and kind == "sharded"
        if engine.control.num_processes == 1 or not isinstance(self._io(), AtomicCheckpointIO) or self._only_files:
            return False
        return (
            self._options.async_save
            or sum(tensor.nbytes for tensor in tensors_of(engine.module).values()) > SHARDED_ABOVE
        )

    def save(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any, engine: Engine | None, *, first: bool
    ) -> None:
        """Write a checkpoint, as a folder on all ranks or as a file on the first one.

        Raises:
            CheckpointError: it, or in the background the one before, cannot be written.
        """
        if engine is not None:
            checkpoint[KEY] = _entry(engine)
            if "optimizer_states" in checkpoint:  # missing if only weights are saved
                checkpoint[KEY]["pipeline"] = engine.pipeline_state_dict(sharded=self.sharded(engine))
        if engine is not None and self.sharded(engine):
            self._save_folder(checkpoint, path, engine.control)
            return
        if engine is not None and engine.control.world_size > 1:
            checkpoint = fill(checkpoint, engine.control)
        if first:
            self._saver.wait()  # one copy at a time is in memory
            staged = self._saver.staged(checkpoint)
            write = partial(self._io().save_checkpoint, staged, path, storage_options=storage_options)
            self._saver.run(partial(_written, write, staged.get("state_dict", {})))

    def _save_folder(self, checkpoint: Mapping[str, Any], path: Any, control: Control) -> None:
        path = control.broadcast(str(path))
        if _is_url(path):
            raise CheckpointError(
                f"The checkpoint {path} is to be a folder (strategy.state_dict_type={self._options.state_dict_type}), "
                "which needs a file system that all ranks share. Give a path on one."
            )
        tensors, rest = split(checkpoint, first=control.first)
        self._saver.wait()
        staged, meta = self._saver.staged(tensors), dumped(rest) if control.first else b""
        self._saver.run(partial(write_folder, staged, meta, Path(path), self._group_of(control)))

    def remove(self, path: Any) -> None:
        """Remove a checkpoint, as soon as the one that is being written is there. Only global rank 0 calls this."""
        self._saver.afterwards(partial(self._io().remove_checkpoint, path))

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointError: it could not be written.
        """
        self._saver.wait()

    def end(self) -> None:
        """Wait, and save without a thread from now on: nobody would wait for it."""
        self._saver.background = False
        self.wait()

    def _group_of(self, control: Control) -> dist.ProcessGroup:
        """The process group for writing; a thread needs one of its own."""
        if not self._saver.background:
            return control.everyone
        if self._group is None:
            self._group = control.mesh.another_world()
        return self._group


def _written(write: Callable[[], None], values: Mapping[str, Any]) -> None:
    """Write a file; modules in it, such as those among hyperparameters, get their values from the state dict."""
    with pickled_as(values):
        write()


def _entry(engine: Engine) -> dict[str, Any]:
    """The facts of a checkpoint for later runs of this library, and for `gpp-checkpoint`."""
    return {
        "seed": engine.job.seed,
        "step": engine.num_steps,
        "plan": plan_table(engine.plan, width=_WIDTH) if engine.control.first else "",
        "mini_batches": engine.control.num_pipelines,
        "parameters": engine.optimizer_parameters,
        "torch": str(torch.__version__),
    }


_WIDTH = 80
"""Characters of a line of the plan in a checkpoint, which terminals of all widths will show."""


def _is_url(path: Any) -> bool:
    return "://" in str(path)
