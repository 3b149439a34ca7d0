"""Micro-batches of training that are more than equal numbers of samples, in their order.

Rows of a tensor may belong to samples (several images to each); packed documents stay in one piece; samples of
different lengths may make micro-batches of equal work; or a function of the user divides the mini-batch. So each
micro-batch is a mini-batch of its own, with sizes of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.batch import (
    BatchDims,
    Samples,
    batch_size_of,
    known_to_pytree,
    named_parts,
    samples_in,
)
from lightning_gpp.errors import ConfigError, did_you_mean
from lightning_gpp.plan_parts import even_parts, share_of
from lightning_gpp.simulation import Timeline
from lightning_gpp.stages.counts import Counted
from lightning_gpp.stages.rows import RowOwner, index_owners, rows_of_samples
from lightning_gpp.wording import with_article

SAMPLES: Final = "samples"
DOCUMENTS: Final = "documents"

Divide = Callable[[Any, int], Sequence[Any]]
"""A function of the user: from a mini-batch and a number of micro-batches to these, or fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Divides mini-batches into micro-batches.

    Args:
        by: "samples" for equal numbers of samples; "documents" for whole documents of a packed row, in about equal
            numbers of tokens; the entries of a tensor, such as `attention_mask:except0`, for samples sorted by length,
            without padding beyond their longest, so that micro-batches take about equal time; or a function.
        owners: the samples to which rows of tensors belong, by the path of the tensor.
        number: the most micro-batches.
        dims: the dimensions that count samples.
    """

    by: str | Divide
    owners: Mapping[str, RowOwner]
    number: int
    dims: BatchDims

    def note(self, batch: Any, parts: Sequence[Any], timeline: Callable[[Iterable[float]], Timeline]) -> str:
        """Sentences that say how a mini-batch is divided, and what that saves.

        `timeline`: simulates micro-batches, from the work of each beside that of the first one.
        """
        by = getattr(self.by, "__qualname__", self.by)
        rows = f" The rows of {', '.join(self.owners)} go with their samples." if self.owners else ""
        sizes = ", ".join(str(samples_in(part, self.dims)) for part in parts)
        saving = "" if callable(self.by) or self.by == SAMPLES else self._saving(batch, parts, timeline)
        return f"Mini-batches are divided by {by}, the first one into micro-batches of {sizes} samples.{rows}{saving}"

    def _saving(self, batch: Any, parts: Sequence[Any], timeline: Callable[[Iterable[float]], Timeline]) -> str:
        own, others = self._tokens(batch, parts)
        here, there = (timeline(number / own[0] for number in tokens) for tokens in (own, others))
        return (
            f" Simulated, it takes {here.makespan / there.makespan:.2f} of the time of equal numbers of "
            f"{'documents' if self.by == DOCUMENTS else 'samples'} as they come, with a bubble of "
            f"{here.bubble_fraction:.0%} instead of {there.bubble_fraction:.0%}."
        )

    def _tokens(self, batch: Any, parts: Sequence[Any]) -> tuple[list[int], list[int]]:
        """The tokens of these micro-batches, with padding, and of as many of equal numbers of samples or documents."""
        if self.by == DOCUMENTS:
            own, each = [_bounds(part)[-1] for part in parts], [b - a for a, b in pairwise(_bounds(batch))]
        else:
            found = (_Lengths.of(str(self.by), of, samples_in(of, self.dims), self.dims) for of in (batch, *parts))
            each, *rows = ([lengths.padded] * len(lengths.of_samples) for lengths in found)
            own = [*map(sum, rows)]
        shares = (share_of(len(each), place, len(parts)) for place in range(len(parts)))
        return own, [sum(each[slice(*share)]) for share in shares]

    def parts(self, batch: Any, number: int | None = None) -> list[Any]:
        """The micro-batches of a mini-batch, at most `number` of them.

        Raises:
            ConfigError: the options do not fit the mini-batch.
        """
        number = self.number if number is None else number
        if callable(self.by):
            return self._given(self.by, batch, number)
        if self.by == DOCUMENTS:
            return documents(batch, number)
        total = batch_size_of(batch, self.dims)
        rows = rows_of_samples(batch, total, self.owners)
        if self.by == SAMPLES:
            return self._chosen(batch, total, rows, with_rows(total, number, [[*map(len, of)] for of in rows.values()]))
        lengths = _Lengths.of(self.by, batch, total, self.dims)
        groups = equal_work(lengths.of_samples, number)
        return [lengths.trimmed(part) for part in self._chosen(batch, total, rows, groups)]

    def sizes(self, parts: Sequence[Any]) -> list[int]:
        """The samples of micro-batches; of packed rows shares of a constant number, because all rows count alike."""
        if self.by == DOCUMENTS:
            shares = (share_of(self.number, place, len(parts)) for place in range(len(parts)))
            return [stop - start for start, stop in shares]
        return [samples_in(part, self.dims) for part in parts]

    def few(self, batch: Any, most: int) -> Any:
        """A mini-batch with the first samples, at most so many, for a comparison; a function gets all."""
        if callable(self.by):
            return batch
        if self.by == DOCUMENTS:
            return first_documents(batch, most)
        total = batch_size_of(batch, self.dims)
        rows = rows_of_samples(batch, total, self.owners)
        return self._chosen(batch, total, rows, [range(min(most, total))])[0]

    def _chosen(
        self, batch: Any, total: int, rows: Mapping[str, Sequence[range]], groups: Sequence[Sequence[int]]
    ) -> list[Any]:
        """The samples of these groups, with their `rows`."""
        samples, indices = Samples(batch, total, self.dims), index_owners(batch, total, self.owners)

        def part(group: Sequence[int]) -> Any:
            own = {name: [row for sample in group for row in of[sample]] for name, of in rows.items()}
            counts = {path: torch.tensor([len(rows[name][i]) for i in group]) for path, name in indices.items()}
            made = {path: torch.arange(len(group)).repeat_interleave(count) for path, count in counts.items()}
            return samples.chosen(group, own, made)

        return [part(group) for group in groups]

    def _given(self, divide: Divide, batch: Any, number: int) -> list[Any]:
        found, name = divide(batch, number), getattr(divide, "__qualname__", divide)
        if isinstance(found, Mapping | Tensor | str):
            raise ConfigError(
                f"strategy.micro_batch_by: the function {name} returned {with_article(type(found).__name__)}; it has "
                "to return a list of micro-batches."
            )
        parts, total = list(found), samples_in(batch, self.dims)
        if not 1 <= len(parts) <= number:
            raise ConfigError(
                f"strategy.micro_batch_by: the function {name} returned {len(parts)} micro-batches; it has to return "
                f"at least 1, and at most the {number} that it is asked for."
            )
        sizes = [samples_in(part, self.dims) for part in parts]
        if total > 1 and sum(sizes) != total:
            raise ConfigError(
                f"strategy.micro_batch_by: the function {name} returned micro-batches of {sizes} samples for {total} "
                "samples; every sample has to be in one of them. If another tensor counts samples, name it by "
                "strategy.batch_dims."
            )
        return parts

    def check(self, batch: Any) -> None:
        """Refuse owners of rows of tensors that the first mini-batch does not have.

        Raises:
            ConfigError: names the path.
        """
        names = [name for name, _ in named_parts(batch) if name]
        for wrong in (name for name in self.owners if name not in names):
            raise ConfigError(
                f"strategy.batch_rows names {wrong!r}, which is no part of the mini-batch.{did_you_mean(wrong, names)}"
            )


def with_rows(total: int, number: int, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Equal numbers of samples in their order; if some would have no rows of a tensor that has some, as networks often
    cannot compute none, samples with many rows are dealt out first.

    Args:
        total: the number of samples.
        number: the most micro-batches.
        rows: of each tensor, those of each sample.
    """
    groups = [list(range(*part)) for part in even_parts(total, -(-total // number))]
    present = [counts for counts in rows if any(counts)]
    if all(any(counts[sample] for sample in group) for group in groups for counts in present):
        return groups
    full = [sample for sample in range(total) if all(counts[sample] for counts in present)]
    order = sorted(range(total), key=lambda sample: (sample not in full, -sum(counts[sample] for counts in present)))
    number = max(1, min(len(groups), len(full)))
    return [sorted(order[first::number]) for first in range(number)]


# --- packed documents


def documents(batch: Any, number: int) -> list[Any]:
    """The micro-batches of a packed row: whole documents, in their order, in about equal numbers of tokens."""
    bounds = _bounds(batch)
    targets = [bounds[-1] * part / number for part in range(number + 1)]
    nearest = {min(range(len(bounds)), key=lambda i: abs(bounds[i] - target)) for target in targets}
    return [_between(batch, bounds, *pair) for pair in pairwise(sorted(nearest))]


def first_documents(batch: Any, most: int) -> Any:
    """The packed row of the first documents, at most so many."""
    bounds = _bounds(batch)
    return _between(batch, bounds, 0, min(most, len(bounds) - 1))


def _bounds(batch: Any) -> list[int]:
    """The first tokens of all documents, and the number of tokens.

    Raises:
        ConfigError: nothing in the mini-batch says where documents begin.
    """
    tensors = [(name, node) for name, node in named_parts(batch) if isinstance(node, Tensor) and not node.is_complex()]
    lengths = {_num_tokens(node) for _, node in tensors}
    for _, node in tensors:
        if _is_cumulative(node) and int(node[-1]) in lengths:
            return list(map(int, node.tolist()))
    for name, node in tensors:
        if name.endswith("position_ids") and node.dim() and node.numel() == _num_tokens(node):
            flat = node.reshape(-1)
            return [*map(int, (flat == 0).nonzero().reshape(-1).tolist()), len(flat)]
    raise ConfigError(
        "strategy.micro_batch_by=documents needs a packed row (shape 1 x tokens) with cumulative lengths (a tensor 0, "
        "n1, n1 + n2, ... such as cu_seqlens) or position_ids that begin with 0 in each document; the mini-batch has "
        f"{ {name: tuple(node.shape) for name, node in tensors} }."
    )


def _is_cumulative(node: Tensor) -> bool:
    if node.dim() != 1 or len(node) < 2 or node.is_floating_point() or node.dtype is torch.bool:
        return False
    return int(node[0]) == 0 and bool((node[1:] > node[:-1]).all())


def _num_tokens(node: Tensor) -> int:
    """Tokens of a packed row, with or without a dimension for its one sample."""
    dims: list[int] = [*node.shape[:2], 1, 1]
    return dims[1] if dims[0] == 1 else dims[0]


def _between(batch: Any, bounds: Sequence[int], first: int, last: int) -> Any:
    """The packed row of documents `[first, last)`."""
    start, stop, total = bounds[first], bounds[last], bounds[-1]

    def cut(node: Any) -> Any:
        if not isinstance(node, Tensor) or not node.dim():
            return node
        if _is_cumulative(node) and node.tolist() == [*bounds]:
            return node[first : last + 1] - start
        if node.dim() > 1 and node.shape[:2] == (1, total):
            return node.narrow(1, start, stop - start)
        return node.narrow(0, start, stop - start) if len(node) == total else node

    return pytree.tree_map(cut, known_to_pytree(batch))


# --- equal work


def equal_work(lengths: Sequence[int], number: int) -> list[list[int]]:
    """Divide samples into at most `number` groups so that the largest group, padded to its longest, is the smallest.

    Samples of a group follow each other in the order of their lengths, which loses nothing: a group costs its number
    times its longest.
    """
    order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])

    def groups(most: int) -> list[list[int]]:
        made: list[list[int]] = []
        for sample in order:
            if not made or (len(made[-1]) + 1) * max(1, lengths[made[-1][0]]) > most:
                made.append([])
            made[-1].append(sample)
        return made

    longest = max(1, *lengths)
    sizes = range(longest, longest * len(lengths) + 1)
    return groups(sizes[bisect_left(sizes, True, key=lambda most: len(groups(most)) <= number)])


@dataclass(frozen=True, slots=True)
class _Lengths:
    """The lengths of samples, by the entries of a tensor of `padded` entries for each."""

    entries: Counted
    of_samples: list[int]
    padded: int

    @classmethod
    def of(cls, by: str, batch: Any, total: int, dims: BatchDims) -> _Lengths:
        entries = Counted.parsed(by)
        found = None if entries is None else entries.rows(batch, total, dims)
        if entries is None or found is None or found.dim() != 2:
            names = [name for name, node in named_parts(batch) if isinstance(node, Tensor) and node.dim() == 2]
            raise ConfigError(
                f"strategy.micro_batch_by={by} names no tensor of samples x entries in the mini-batch; it has {names}."
            )
        return cls(entries, _last(found, entries.ignored).tolist(), found.shape[1])

    def trimmed(self, batch: Any) -> Any:
        """A micro-batch without the entries behind those that count: of this tensor, and of others as long."""
        total = batch_size_of(batch)
        tensor = next(node for name, node in named_parts(batch) if name == self.entries.path)
        longest = max(1, int(_last(tensor, self.entries.ignored).max()))

        def cut(node: Any) -> Any:
            if not isinstance(node, Tensor) or node.dim() < 2 or len(node) != total:
                return node
            sized = range(1, node.dim()) if not node.is_floating_point() else range(1, 2 if node.dim() > 2 else 1)
            for dim in (dim for dim in sized if node.shape[dim] == self.padded):
                node = node.narrow(dim, 0, longest)
            return node

        return pytree.tree_map(cut, known_to_pytree(batch))


def _last(rows: Tensor, ignored: int) -> Tensor:
    """The number of entries of each row up to the last that counts."""
    places = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    return ((rows != ignored) * places).amax(dim=1)
