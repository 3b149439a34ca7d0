"""Counts of samples in the mean over a mini-batch, if they do not count the same: the entries that a loss averages.

A mean over unmasked tokens weighs a sample by its tokens. So a micro-batch counts by the tokens that it has, and the
mean over micro-batches is that over all tokens of the mini-batch, for the loss and for what the step logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lightning_gpp.capture.batch import BatchDims, named_parts, named_tensors
from lightning_gpp.errors import ConfigError, did_you_mean

IGNORED: Final = -100
"""The label that losses of torch and transformers ignore by default."""

_FORM: Final = re.compile(r"(?P<path>[^:]+)(?P<shifted>:shifted)?(?::except(?P<ignored>-?\d+))?")


@dataclass(frozen=True, slots=True)
class Counted:
    """The entries of a tensor of the mini-batch that a loss averages.

    Args:
        path: the path of the tensor in the mini-batch, as in `batch_dims`.
        shifted: without the first entry of each sample, as where a language model predicts the next token.
        ignored: the value of entries that do not count. Numbers with a fraction count by their value.
    """

    path: str
    shifted: bool = False
    ignored: int = IGNORED

    @classmethod
    def parsed(cls, text: str) -> Counted | None:
        """The entries that an option names, as `labels`, `labels:shifted` or `mask:except0`; None for another form."""
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        ignored = found["ignored"]
        return cls(found["path"], found["shifted"] is not None, IGNORED if ignored is None else int(ignored))

    def __str__(self) -> str:
        ignored = "" if self.ignored == IGNORED else f":except{self.ignored}"
        return f"{self.path}{':shifted' if self.shifted else ''}{ignored}"

    def of_samples(self, batch: Any, total: int, dims: BatchDims) -> list[float] | None:
        """The entries of each sample; None if the mini-batch has no such tensor with one row for each."""
        found = self.rows(batch, total, dims)
        return None if found is None else self._of_rows(found)

    def in_part(self, batch: Any, total: int, dims: BatchDims) -> float:
        """The entries of a micro-batch, whatever counts its samples.

        Raises:
            ConfigError: it has no such tensor.
        """
        found = self.rows(batch, total, dims)
        if found is None:
            found = next((node for name, node in named_parts(batch) if name == self.path), None)
        if not isinstance(found, Tensor) or not found.dim():
            raise self.missing(batch, total, dims)
        return sum(self._of_rows(found))

    def rows(self, batch: Any, total: int, dims: BatchDims) -> Tensor | None:
        """The tensor, with the samples as its first dimension; None if the mini-batch has none."""
        return next((tensor for name, tensor in named_tensors(batch, total, dims) if name == self.path), None)

    def _of_rows(self, rows: Tensor) -> list[float]:
        rows = rows[:, 1:] if self.shifted and rows.dim() > 1 else rows
        counts = rows if rows.is_floating_point() else rows != self.ignored
        entries: list[float] = counts.reshape(len(rows), -1).to(torch.float64).sum(1).tolist()
        return entries

    def missing(self, batch: Any, total: int, dims: BatchDims) -> ConfigError:
        """The error for a mini-batch of training without the tensor."""
        names = [name for name, _ in named_tensors(batch, total, dims)]
        return ConfigError(
            f"strategy.loss_reduction names {self.path!r}, which is neither mean, nor sum, nor a tensor of the "
            f"mini-batch with one row for each sample.{did_you_mean(self.path, names)}"
        )


def reduction(value: object) -> str:
    """The option as it is kept.

    Raises:
        ConfigError: it is neither mean, nor sum, nor a part of the mini-batch.
    """
    if isinstance(value, str) and (value in ("mean", "sum") or Counted.parsed(value) is not None):
        return value
    raise ConfigError(
        f"strategy.loss_reduction is {value!r}; it must be 'mean', 'sum', or the tensor of the mini-batch whose "
        "entries the loss averages, such as 'labels' (those that are not -100), 'labels:shifted' or 'mask:except0'."
    )


def counted(reduction: str) -> Counted | None:
    """The entries by which micro-batches count; None for those that count by their samples."""
    return None if reduction in ("mean", "sum") else Counted.parsed(reduction)


def shares_of(
    parts: Sequence[Any], sizes: Sequence[int], counted: Counted | None, dims: BatchDims
) -> list[float] | None:
    """The samples that micro-batches count for, which have so many; None if they count by these.

    Raises:
        ConfigError: a micro-batch has no such tensor.
    """
    if counted is None:
        return None
    entries = [counted.in_part(part, size, dims) for part, size in zip(parts, sizes, strict=True)]
    total = sum(entries)
    return [sum(sizes) * each / total for each in entries] if total else list(map(float, sizes))


def candidates(batch: Any, total: int, dims: BatchDims) -> Iterator[list[Counted]]:
    """Yield the entries that the loss of these samples may average: those of labels, then those that masks show."""
    tensors = {name: rows for name, rows in named_tensors(batch, total, dims) if not rows.is_floating_point()}
    masks = {name: rows for name, rows in tensors.items() if bool(((rows == 0) | (rows == 1)).all())}
    for ignored, kind in ((IGNORED, tensors), (0, masks)):
        hiding = {name: rows for name, rows in kind.items() if bool((rows == ignored).any())}
        yield [
            Counted(name, shifted, ignored) for name, rows in hiding.items() for shifted in (False, True)[: rows.dim()]
        ]


def share(counts: Sequence[float], start: int, stop: int) -> float:
    """The samples that those from one number to another count for: as many as they are if none counts."""
    total = sum(counts)
    return len(counts) * sum(counts[start:stop]) / total if total else stop - start


def scaled(loss: Tensor, factor: float, sources: Iterable[Tensor]) -> Tensor:
    """The loss of a micro-batch times its share. One that averages nothing is NaN in torch, as its gradient may be; it
    does not count, so it is a zero of the tensors from which it is computed (`sources`).
    """
    if factor:
        return loss * factor
    zeros = [source.reshape(-1)[:0].sum() for source in sources if source.requires_grad]
    return sum(zeros, torch.zeros_like(loss)).to(loss.dtype) if zeros else torch.nan_to_num(loss) * 0
