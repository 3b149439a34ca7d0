"""Data loaders whose mini-batches all pipelines share, and which know their position.

The mini-batches, and so the numbers of a run, do not depend on how many pipelines there are: a run may be resumed on
others, also in the middle of an epoch.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_gpp.errors import ConfigError
from lightning_gpp.training.options import Options


def mini_batches_of(options: Options, num_pipelines: int) -> int:
    """Number of the data loader's mini-batches in a step."""
    return 1 if options.mini_batch == "shared" else num_pipelines


def warn_of_others(before: int, now: int) -> None:
    """Tell the user that a resumed run has larger or smaller mini-batches than before: see `mini_batches_of`."""
    if before != now:
        warnings.warn(
            f"The checkpoint was trained with {before} pipelines, each with mini-batches of its own, and this run has "
            f"{now}: the mini-batch of a step is {now / before:g} times as large. strategy.mini_batch=shared, from the "
            "beginning, keeps it on any number of processes.",
            stacklevel=2,
        )


class Shares:
    """A batch sampler: one pipeline's part of every mini-batch of `whole`, a batch sampler that is the same on all.

    Attributes:
        begin: number of mini-batches that the next iteration leaves out.
    """

    def __init__(self, whole: Any, pipeline: int, num_pipelines: int) -> None:
        self.whole, self.pipeline, self.num_pipelines, self.begin = whole, pipeline, num_pipelines, 0

    def __iter__(self) -> Iterator[list[Any]]:
        begin, self.begin = self.begin, 0
        for indices in itertools.islice(self.whole, begin, None):
            each, rest = divmod(len(indices), self.num_pipelines)
            if rest:
                raise _uneven(len(indices), self.num_pipelines)
            yield list(indices[self.pipeline * each : (self.pipeline + 1) * each])

    def __len__(self) -> int:
        return len(self.whole)

    def __getattr__(self, name: str) -> Any:
        if name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)


class SharedLoader:
    """The data loader of one pipeline, which loads its share of every mini-batch; its state is its position.

    Args:
        loader: loads whole mini-batches, in the same order on all pipelines.
        pipeline: number of this pipeline.
        num_pipelines: how many there are.

    Raises:
        ConfigError: it is not a `DataLoader` that reads samples by their indices.
    """

    def __init__(self, loader: Iterable[Any], pipeline: int, num_pipelines: int) -> None:
        if (
            not isinstance(loader, DataLoader)
            or isinstance(loader.dataset, IterableDataset)
            or not loader.batch_sampler
        ):
            raise _no_indices(loader)
        self._shares = Shares(loader.batch_sampler, pipeline, num_pipelines)
        self.loader = copy.copy(loader)
        vars(self.loader)["batch_sampler"] = self._shares  # setting it is refused after the construction
        self._position = 0
        self._resumed = {"epoch": 0, "position": 0}

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, {"epoch": 0, "position": 0}
        self._position = self._shares.begin = resumed["position"] if resumed["epoch"] == self._epoch else 0
        for batch in self.loader:
            self._position += 1
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _epoch(self) -> int:
        """That of the sampler, which decides the order."""
        return int(getattr(self.loader.sampler, "epoch", 0))

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its mini-batches that have been read."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration begin at a position, if it is in that epoch."""
        self._resumed, self._position = dict(state), state["position"]


def _uneven(samples: int, num_pipelines: int) -> ConfigError:
    return ConfigError(
        f"A mini-batch of {samples} samples cannot be shared evenly by {num_pipelines} pipelines "
        "(strategy.mini_batch=shared). Choose a batch size that they divide, and drop_last=True if the last mini-batch "
        "of an epoch is smaller."
    )


def _no_indices(loader: object) -> ConfigError:
    return ConfigError(
        "strategy.mini_batch=shared needs a torch.utils.data.DataLoader with a batch size and a dataset that is read "
        f"by index, not {type(loader).__name__}. Use strategy.mini_batch=own."
    )
