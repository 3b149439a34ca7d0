"""Data loading: ranks that run the user's step load the data; the others go through the loops with placeholders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import InitVar, dataclass
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpp.capture.kept import Kept, unchanged, unmoved
from lightning_gpp.errors import ConfigError
from lightning_gpp.reports.units import size
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.loaders import data_parallel_world, divide_samples, read_in_world
from lightning_gpp.user_code import UNKNOWN, line_of
from lightning_gpp.wording import described


def transferred(trainer: pl.Trainer, batch: Any, device: torch.device, loader: int = 0) -> Any:
    """The mini-batch of a loader (by number) after the conversion of its precision and the hooks of its transfer."""
    batch, data = trainer.precision_plugin.convert_input(batch), getattr(trainer, "datamodule", None)
    for name, others in (
        ("on_before_batch_transfer", (loader,)),
        ("transfer_batch_to_device", (device, loader)),
        ("on_after_batch_transfer", (loader,)),
    ):
        overridden = data is not None and is_overridden(name, data)
        batch = getattr(data if overridden else trainer.lightning_module, name)(batch, *others)
    return batch


@dataclass(frozen=True, slots=True)
class Taken:
    """A value that a loop passes to the strategy after the first hook of a transfer, by which its calls are known.

    `batch`: the mini-batch; None if it comes from elsewhere, or went through the hooks when it was read ahead.
    """

    batch: Any


@dataclass
class Placeholder:
    """Represents the batch, or a large tensor of it or of a result, on ranks that have none.

    `samples` is empty, but its first size is the batch size. `num_bytes`: the size of what was too large to be sent.
    """

    samples: Tensor
    num_bytes: InitVar[int] = 0  # no field, from which Lightning would take a number of samples

    def __post_init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse(f"[{key!r}]")

    def __len__(self) -> NoReturn:
        self._refuse(" with len()")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    def _refuse(self, use: str) -> NoReturn:
        what = "A tensor" if self._num_bytes else "A batch"
        raise ConfigError(
            f"{what} was used here ({use.strip()}), on a rank that has none: only the ranks that run the user's step "
            f"have it{self._size()}. Guard this code with `if trainer.is_global_zero`."
        )

    def _size(self) -> str:
        large = f", and {size(self._num_bytes)} are too much to be sent to the others for hooks"
        return large if self._num_bytes else ""


class ShadowLoader:
    """Replaces a data loader on ranks without data: it has the same length and settings, but yields placeholders."""

    def __init__(self, loader: Any, control: Control, agreed: bool) -> None:
        self.loader, self.control, self.agreed = loader, control, agreed
        for name in ("sampler", "batch_sampler", "dataset", "batch_size", "drop_last", "collate_fn", "num_workers"):
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))
        if has_state(loader):  # so that the states in a checkpoint find their loaders; that of data loads them
            self.state_dict, self.load_state_dict = dict[str, Any], lambda state: None
        batch_sampler = getattr(loader, "batch_sampler", None)
        if batch_sampler is not None:
            batch_sampler.seen_batch_indices = []  # which prediction writers read; it is never iterated here

    def __len__(self) -> int:
        with data_parallel_world(self.control.mesh):
            return len(self.loader)

    def __iter__(self) -> Iterator[Placeholder]:
        if self.agreed:
            while self.control.share_loaded(False):
                yield Placeholder(torch.empty(0, 0))
        else:
            for _ in range(len(self)):
                yield Placeholder(torch.empty(0, 0))

    def __repr__(self) -> str:
        return f"ShadowLoader(of {type(self.loader).__name__}; rank {self.control.mesh.own_process} loads no data)"


class AgreedLoader:
    """A data loader of unknown length, or with a state, which tells the other ranks whether there is another batch.

    Attributes:
        tell: called with True before every batch, and with False at the end.
        position: the state of the loader after the current mini-batch, for checkpoints, if others have been read ahead.
    """

    position: dict[str, Any] | None = None

    def __init__(self, loader: Any, control: Control) -> None:
        self.loader, self.control = loader, control
        self.tell: Callable[[bool], object] = control.share_loaded
        if has_state(loader):
            self.state_dict, self.load_state_dict = self._state, loader.load_state_dict

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict() if self.position is None else self.position
        return state

    def __len__(self) -> int:
        with data_parallel_world(self.control.mesh):
            return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in read_in_world(self.loader, self.control.mesh):
            self.tell(True)
            yield batch
        self.tell(False)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def distribute(loader: Any, control: Control, wanted: Mapping[str, int]) -> Any:
    """The loader to use on this rank.

    Args:
        loader: the user's.
        control: the side channel of this rank.
        wanted: `num_replicas` and `rank` of distributed samplers.

    Raises:
        ConfigError: its sampler divides samples among others than pipelines.
    """
    divide_samples(loader, control.mesh, wanted)
    agreed = has_state(loader) or not _ends_when_it_says(loader)
    if control.loads:
        alone = control.num_devices * control.num_members == 1
        if alone or not agreed:
            return loader
        return AgreedLoader(loader, control)
    return ShadowLoader(loader, control, agreed)


def has_state(loader: Any) -> bool:
    """True for a loader that keeps its position."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _ends_when_it_says(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        return not isinstance(loader.dataset, IterableDataset)
    return isinstance(loader, Sequence)


def is_moved_by_reading(loader: Any) -> bool:
    """True for an iterator, such as a generator, and for a loader that keeps its position."""
    loader = _inside(loader)
    return isinstance(loader, Iterator) or (has_state(loader) and not _reads_indices(loader))


def peek(loader: Any) -> Any:
    """The first batch of a loader, without changing the loader, its data, random numbers or running workers.

    None if it is empty.

    Batches that are None, which Lightning leaves out, do not count. The loader must not be one that reading moves.

    Raises:
        ConfigError: the user's data fail there.
    """
    world = data_parallel_world(loader.control.mesh) if isinstance(loader, AgreedLoader) else nullcontext()
    loader = _inside(loader)
    try:
        with isolate_rng(), as_before(loader), world:
            return next((batch for batch in _read(loader) if batch is not None), None)
    except Exception as error:
        line = line_of(error)
        place = "" if line == UNKNOWN else f" ({line})"
        raise ConfigError(f"The data cannot make their first mini-batch: {described(error)}{place}.") from error


@contextmanager
def as_before(*values: Any) -> Iterator[None]:
    """Restore afterwards what these objects, and those inside of them, keep between calls: counters, random generators.

    The first mini-batch is read at set-up, and once more by the loop.
    """
    kept = Kept((("", value) for value in values), libraries=True, apart=(pl.Trainer,))
    with unchanged(kept.holders), unmoved(kept.generators):
        yield


def _inside(loader: Any) -> Any:
    """The user's loader."""
    while isinstance(loader, AgreedLoader | ShadowLoader):
        loader = loader.loader
    return loader


def _read(loader: Any) -> Iterator[Any]:
    if _reads_indices(loader):
        indices = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        for index in indices:
            single = loader.batch_sampler is None
            samples = loader.dataset[index] if single else [loader.dataset[i] for i in index]
            yield loader.collate_fn(samples)
    else:
        yield from loader


def _reads_indices(loader: Any) -> bool:
    """True if samples can be read by their indices, without the loader."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
