"""Rows of tensors that belong to samples: several images to each, patches of images, boxes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp.capture.batch import named_parts
from lightning_gpp.errors import ConfigError, did_you_mean

_FORM: Final = re.compile(r"(?P<path>[^:]+?)(?::only(?P<only>-?\d+)|(?P<product>:product))?")


@dataclass(frozen=True, slots=True)
class RowOwner:
    """The part of a mini-batch that says to which samples the rows of a tensor belong.

    Args:
        path: its path. It has the number of rows of each sample, or the sample of each row; or, if its own rows belong
            to samples, the number of rows for each of its rows.
        only: rows belong to a sample in proportion to its entries with this value, such as placeholders of images.
        product: the numbers are products of its rows, such as the patches of an image grid.
    """

    path: str
    only: int | None = None
    product: bool = False

    @classmethod
    def parsed(cls, text: str) -> RowOwner | None:
        """From the form of the option; None if it has none."""
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        return cls(found["path"], None if found["only"] is None else int(found["only"]), bool(found["product"]))

    def __str__(self) -> str:
        return f"{self.path}{'' if self.only is None else f':only{self.only}'}{':product' if self.product else ''}"


def owners_of(rows: Mapping[str, str]) -> dict[str, RowOwner]:
    """The owners of rows, by the path of the tensor."""
    parsed = {name: RowOwner.parsed(text) for name, text in rows.items()}
    return {name: owner for name, owner in parsed.items() if owner is not None}


def known_rows(module: nn.Module, batch: Any) -> dict[str, str]:
    """The option for models of transformers that take the images of all samples in one tensor, as their processors make
    it; empty for other models and mini-batches, and if each sample has one row.
    """
    configs = (getattr(part, "config", None) for part in module.modules())
    config = next((each for each in configs if _image_token(each) is not None), None)
    paths = {name.rpartition(".")[2]: name for name, node in named_parts(batch) if isinstance(node, Tensor)}
    ids, pixels, grid = (paths.get(name) for name in ("input_ids", "pixel_values", "image_grid_thw"))
    if config is None or ids is None or pixels is None:
        return {}
    if grid is None:
        found = {pixels: f"{ids}:only{_image_token(config)}"}
    else:
        found = {grid: f"{ids}:only{getattr(config, 'vision_start_token_id', None)}", pixels: f"{grid}:product"}
    return found if _several(found, batch, len(dict(named_parts(batch))[ids])) else {}


def _image_token(config: Any) -> int | None:
    tokens = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((token for token in tokens if isinstance(token, int)), None)


def _several(found: Mapping[str, str], batch: Any, total: int) -> bool:
    """True if the owners fit the mini-batch, and not each sample has one row."""
    try:
        rows = rows_of_samples(batch, total, owners_of(found))
    except ConfigError:
        return False
    return any(len(own) != 1 for of in rows.values() for own in of)


def rows_of_samples(batch: Any, total: int, owners: Mapping[str, RowOwner]) -> dict[str, list[range]]:
    """The rows that belong to each sample, for all of these tensors that the mini-batch has.

    Raises:
        ConfigError: an owner does not exist, or does not fit.
    """
    parts = dict(named_parts(batch))
    return {name: _rows(name, parts, total, owners) for name in owners if isinstance(parts.get(name), Tensor)}


def index_owners(batch: Any, total: int, owners: Mapping[str, RowOwner]) -> dict[str, str]:
    """The owners that name the sample of each row, by their paths, each with a tensor whose rows it is for."""
    parts = dict(named_parts(batch))
    present = {name: owner for name, owner in owners.items() if isinstance(parts.get(name), Tensor)}
    return {
        owner.path: name
        for name, owner in present.items()
        if owner.only is None and owner.path not in owners and isinstance(index := parts.get(owner.path), Tensor)
        if _is_index(_numbers(index.cpu(), owner), total, len(parts[name]))
    }


def _is_index(numbers: Sequence[int], total: int, rows: int) -> bool:
    counts = len(numbers) == total and sum(numbers) == rows
    return not counts and len(numbers) == rows and [*numbers] == sorted(numbers) and set(numbers) <= {*range(total)}


def _rows(name: str, parts: Mapping[str, Any], total: int, owners: Mapping[str, RowOwner]) -> list[range]:
    owner, rows = owners[name], len(parts[name])
    values = parts.get(owner.path)
    if not isinstance(values, Tensor | list | tuple):
        raise ConfigError(
            f"strategy.batch_rows: the rows of {name!r} are said to belong to samples by {owner.path!r}, which is no "
            f"tensor or list of the mini-batch.{did_you_mean(owner.path, [*parts])}"
        )
    values = torch.as_tensor(values).cpu()
    if owner.path in owners and owner.path != name:
        numbers = _numbers(values, owner)
        counts: Sequence[int] = [sum(numbers[own.start : own.stop]) for own in _rows(owner.path, parts, total, owners)]
    else:
        counts = _counts(values, owner, total, rows)
    if len(counts) != total or sum(counts) != rows:
        raise ConfigError(
            f"strategy.batch_rows: {name!r} has {rows} rows, but {owner} gives {counts[:8]} to {total} samples. It has "
            "to be the number of rows of each sample, or the sample of each row, in order."
        )
    ends = [0, *accumulate(counts)]
    return [range(*pair) for pair in zip(ends, ends[1:], strict=False)]


def _numbers(values: Tensor, owner: RowOwner) -> list[int]:
    flat = values.reshape(len(values), -1)
    numbers: list[int] = (flat.prod(dim=1) if owner.product else flat.sum(dim=1)).tolist()
    return numbers


def _counts(values: Tensor, owner: RowOwner, total: int, rows: int) -> Sequence[int]:
    """Rows of each sample."""
    if owner.only is not None:
        hits = (values == owner.only).reshape(len(values), -1).sum(dim=1)
        each = int(hits.sum()) / rows if rows else 1.0
        return [round(count / each) if each else 0 for count in hits.tolist()]
    numbers = _numbers(values, owner)
    if _is_index(numbers, total, rows):
        return [numbers.count(sample) for sample in range(total)]
    return numbers
