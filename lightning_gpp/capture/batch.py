"""Cutting of mini-batches along their samples: tensors along the dimension that counts samples, lists by index.

The dimension is the first one, unless the user says something else by its path in the mini-batch:

    {"tokens": 1, "class_weights": None}    tokens are (time, samples); the weights are the same for all samples
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.items import is_plain_sequence
from lightning_gpp.errors import ConfigError, ShapeError, did_you_mean
from lightning_gpp.user_code import own_attributes
from lightning_gpp.wording import with_article

BatchDims = Mapping[str, int | None]
"""The dimension that counts samples, or None, by the path of a part of the batch, such as "tokens" or "0.boxes"."""

GUESSED: Final[BatchDims] = {}
UNCOUNTED: Final[BatchDims] = {"": None}
"""For a batch that is never cut: no tensor counts samples."""


def batch_size_of(batch: Any, dims: BatchDims = GUESSED) -> int:
    """Number of samples: as `dims` says, otherwise the length of a list of mappings or of tensors of different shapes,
    otherwise the size of the first dimension of the first tensor that has one.

    Raises:
        ShapeError: nothing in the batch counts samples.
        ConfigError: `dims` names a part that does not exist, or a dimension that no tensor there has.
    """
    parts = list(named_parts(batch))
    _check_names(parts, dims)
    _check_dims(parts, dims)
    sizes = [*_told(parts, dims), *_listed(parts, dims), *_first(parts, dims)]
    if sizes:
        return sizes[0]
    if dims == UNCOUNTED:
        return 1
    raise ShapeError(
        f"The batch ({with_article(type(batch).__name__)}) has no tensor with a batch dimension, so it cannot be cut "
        "into micro-batches. Let the dataloader collate samples into tensors whose first dimension counts the "
        "samples, in dicts, lists, tuples, dataclasses or objects with a method `to`."
    )


def samples_in(batch: Any, dims: BatchDims = GUESSED) -> int:
    """Number of samples of a mini-batch or of arguments; 1 if no tensor has a dimension that counts them."""
    try:
        return batch_size_of(batch, dims)
    except ShapeError:
        return 1


OnTensor = Callable[[torch.Tensor, int], torch.Tensor]
OnList = Callable[[Any], Any]


def device_of(batch: Any) -> torch.device:
    """The device of a mini-batch."""
    devices = (node.device for _, node in named_parts(batch) if isinstance(node, torch.Tensor))
    return next(devices, torch.device("cpu"))


def slice_batch(batch: Any, start: int, stop: int, total: int, dims: BatchDims = GUESSED) -> Any:
    """Samples `[start, stop)` of a batch of `total`; values that are not per sample are unchanged, see `Samples`."""
    return Samples(batch, total, dims).part(start, stop)[0]


class Samples:
    """The samples of a batch of `total`, which is looked through only once.

    Per sample are tensors whose first dimension is `total`, and lists and tuples inside the batch with `total` entries:
    strings and numbers, mappings, sequences of numbers, or tensors of which none has `total` as its first dimension.
    `dims` comes before all that. Other values are unchanged; containers are new ones in every result.

    Attributes:
        leaves: paths of tensors, lists of samples and other values; these, and the dimension that counts samples.
    """

    def __init__(self, batch: Any, total: int, dims: BatchDims = GUESSED) -> None:
        self._batch, self._total, self._dims = batch, total, dims
        self.leaves = list(self._leaves(batch, ""))
        lists = {id(node) for _, node, dim in self.leaves if dim is _LIST}
        self._structure = pytree.tree_flatten(batch, is_leaf=lambda node: id(node) in lists)[1]

    def _leaves(self, node: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(node, torch.Tensor):
            yield name, node, _dim_of(node, name, self._total, self._dims)
        elif node is not self._batch and _is_list_of_samples(node, name, self._total, self._dims):
            yield name, node, _LIST
        elif (children := _children(node)) is None:
            yield name, node, None
        else:
            for key, child in children:
                yield from self._leaves(child, _join(name, key))

    def mapped(self, on_tensor: OnTensor, on_list: OnList) -> Any:
        """The batch with other tensors and lists of samples."""

        def other(node: Any, dim: Any) -> Any:
            return node if dim is None else on_list(node) if dim is _LIST else on_tensor(node, dim)

        return pytree.tree_unflatten([other(node, dim) for _, node, dim in self.leaves], self._structure)

    def chosen(
        self, samples: Sequence[int], rows: Mapping[str, Sequence[int]], made: Mapping[str, torch.Tensor]
    ) -> Any:
        """The batch with these samples, these rows of other tensors, and others in place of some, by their paths."""

        def other(name: str, node: Any, dim: Any) -> Any:
            if name in made:
                return made[name].to(node)
            if name in rows:
                return _rows_of(node, 0, rows[name])
            if dim is _LIST:
                return type(node)(node[sample] for sample in samples)
            return node if dim is None else _rows_of(node, dim, samples)

        return pytree.tree_unflatten([other(*leaf) for leaf in self.leaves], self._structure)

    def part(self, start: int, stop: int) -> tuple[Any, list[Any]]:
        """The batch with samples `[start, stop)`, and the lists of samples in it."""
        lists: list[Any] = []

        def listed(items: Any) -> Any:
            lists.append(items[start:stop])
            return lists[-1]

        return self.mapped(lambda tensor, dim: tensor.narrow(dim, start, stop - start), listed), lists


_LIST: Final = object()
"""Stands for the dimension of a list of samples."""


def _rows_of(tensor: torch.Tensor, dim: int, numbers: Sequence[int]) -> torch.Tensor:
    first = numbers[0] if numbers else 0
    if list(numbers) == list(range(first, first + len(numbers))):
        return tensor.narrow(dim, first, len(numbers))
    return tensor.index_select(dim, torch.tensor(numbers, device=tensor.device))


def resized(batch: Any, num_samples: int, dims: BatchDims = GUESSED, listed: OnList = lambda items: items) -> Any:
    """A batch of another number of samples, of which some come again. `listed`: called with new lists of samples."""

    def tensor(samples: torch.Tensor, dim: int) -> torch.Tensor:
        rows = torch.arange(num_samples, device=samples.device) % max(1, samples.shape[dim])
        return samples.detach().index_select(dim, rows).requires_grad_(samples.requires_grad)

    def again(items: Any) -> Any:
        return listed(type(items)(items[number % len(items)] for number in range(num_samples)))

    return Samples(batch, samples_in(batch, dims), dims).mapped(tensor, again)


def cut_note(batch: Any, dims: BatchDims = GUESSED) -> str:
    """Sentences that say which parts of a batch are cut into micro-batches, and which every micro-batch gets."""
    total = batch_size_of(batch, dims)
    cut, passed = list[str](), list[str]()
    for name, node, dim in Samples(batch, total, dims).leaves:
        if isinstance(node, torch.Tensor):
            along = f" along dimension {dim}" if dim else ""
            (passed if dim is None else cut).append(f"{_label(name)} {tuple(node.shape)}{along}")
        elif node is not None:
            about = type(node).__name__ if dim is None else f"{type(node).__name__} of {total}"
            (passed if dim is None else cut).append(f"{_label(name)} ({about})")
    note = f"Cut into micro-batches: {', '.join(cut)}."
    return f"{note} Given to every micro-batch: {', '.join(passed)}." if passed else note


def _label(name: str) -> str:
    return f"item {name}" if name[:1].isdigit() else name or "the batch"


def counting_note(batch: Any, dims: BatchDims = GUESSED) -> str:
    """Sentences that say which tensor has counted the samples, and the setting if another dimension does.

    Such as the samples of time-major tensors, which labels have as first: a size that all tensors have.
    """
    shapes = {name: tuple(node.shape) for name, node in named_parts(batch) if isinstance(node, torch.Tensor)}
    sizes = (shape[0] for shape in shapes.values() if shape and shape[0] != batch_size_of(batch, dims))
    common = next((size for size in sizes if all(size in shape for shape in shapes.values())), None)
    said = "" if common is None else f"={ {name: shape.index(common) for name, shape in shapes.items()} }"
    return f"{cut_note(batch, dims)} If another dimension counts the samples, set strategy.batch_dims{said}."


def named_tensors(batch: Any, total: int, dims: BatchDims = GUESSED) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch with one row for each sample, by their paths; samples are their first dimension."""
    for name, node in named_parts(batch):
        dim = _dim_of(node, name, total, dims) if isinstance(node, torch.Tensor) else None
        if name and dim is not None:
            yield name, node.movedim(dim, 0)


def loose_rows(batch: Any, dims: BatchDims = GUESSED) -> dict[str, int]:
    """Rows of the tensors that every micro-batch gets only because they have other rows than samples, by path.

    They may belong to samples, such as several images to each.
    """
    total = batch_size_of(batch, dims)
    tensors = ((name, node) for name, node in named_parts(batch) if isinstance(node, torch.Tensor) and node.dim())
    unsaid = ((name, node) for name, node in tensors if _said(name, dims) is None)
    return {name: len(node) for name, node in unsaid if len(node) > 1 and _dim_of(node, name, total, dims) is None}


# --- number of samples


def named_parts(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All parts of a batch with their paths, outer ones first."""
    yield name, node
    for key, child in _children(node) or ():
        yield from named_parts(child, _join(name, key))


def _check_names(parts: Sequence[tuple[str, Any]], dims: BatchDims) -> None:
    names = [name for name, _ in parts]
    for wrong in (name for name, dim in dims.items() if name not in names and dim is not None):
        raise ConfigError(
            f"strategy.batch_dims names {wrong!r}, which is no part of the batch.{did_you_mean(wrong, names[1:])}"
        )


def _check_dims(parts: Sequence[tuple[str, Any]], dims: BatchDims) -> None:
    """Refuse a dimension that none of the tensors has which it is for."""
    for key, dim in dims.items():
        tensors = [(name, node) for name, node in parts if isinstance(node, torch.Tensor) and _key(name, dims) == key]
        if isinstance(dim, int) and tensors and not any(_has(node, dim) for _, node in tensors):
            shapes = ", ".join(f"{_label(name)} {tuple(node.shape)}" for name, node in tensors)
            raise ConfigError(
                f"strategy.batch_dims says that dimension {dim} of {_label(key)} counts samples, but no tensor there "
                f"has that dimension: {shapes}. Dimensions count from 0; name the one that counts samples, or null for "
                "what every micro-batch gets undivided."
            )


def _told(parts: Sequence[tuple[str, Any]], dims: BatchDims) -> Iterator[int]:
    for name, node in parts:
        dim = _said(name, dims)
        if name and type(node) in (list, tuple) and dims.get(name) == 0:
            yield len(node)
        elif isinstance(node, torch.Tensor) and isinstance(dim, int) and _has(node, dim):
            yield node.shape[dim]


def _listed(parts: Sequence[tuple[str, Any]], dims: BatchDims) -> Iterator[int]:
    """Lengths of lists that can only be lists of samples: of mappings, or of tensors of different lengths."""
    for name, node in parts[1:]:
        several = type(node) in (list, tuple) and len(node) > 1 and _said(name, dims) is not _NO
        if several and (all(isinstance(item, Mapping) for item in node) or _is_ragged(node)):
            yield len(node)


def _first(parts: Sequence[tuple[str, Any]], dims: BatchDims) -> Iterator[int]:
    for name, node in parts:
        if isinstance(node, torch.Tensor) and node.dim() > 0 and _said(name, dims) is not _NO:
            yield int(node.shape[0])


# --- dimensions

_NO: Final = object()


def _key(name: str, dims: BatchDims) -> str | None:
    """The key of `dims` for a part: its own path, or that of one around it; None if there is none."""
    while name and name not in dims:
        name = name.rpartition(".")[0]
    return name if name in dims else None


def _said(name: str, dims: BatchDims) -> Any:
    """The user's word on a part: a dimension, `_NO` for none, None for nothing."""
    key = _key(name, dims)
    return None if key is None else _NO if dims[key] is None else dims[key]


def _has(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def _dim_of(tensor: torch.Tensor, name: str, total: int, dims: BatchDims) -> int | None:
    """The dimension of a tensor that counts samples, if there is one."""
    said = _said(name, dims)
    if said is _NO:
        return None
    dim = int(said or 0)
    if _has(tensor, dim) and tensor.shape[dim] == total:
        return dim % tensor.dim()
    if name in dims:
        raise ShapeError(
            f"strategy.batch_dims: dimension {dim} of {name!r} counts samples, but its shape is {tuple(tensor.shape)}, "
            f"and the batch has {total} samples."
        )
    return None


def _is_list_of_samples(node: Any, name: str, total: int, dims: BatchDims) -> bool:
    if type(node) not in (list, tuple) or len(node) != total or total == 0:
        return False
    if _said(name, dims) is _NO or dims.get(name) == 0:
        return dims.get(name) == 0
    if all(isinstance(item, torch.Tensor) for item in node):
        return not any(_dim_of(item, name, total, dims) is not None for item in node) or _is_ragged(node)
    return all(isinstance(item, str | int | float | Mapping) or is_plain_sequence(item) for item in node)


def _is_ragged(node: Sequence[Any]) -> bool:
    """True for tensors that differ only in their length, such as point clouds."""
    if not all(isinstance(item, torch.Tensor) and item.dim() > 0 for item in node):
        return False
    return len({(item.dtype, item.shape[1:]) for item in node}) == 1 and len({len(item) for item in node}) > 1


# --- structure


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """The children of a node with their keys, None for a leaf."""
    if type(node) in (tuple, list):  # these and dicts are many times faster without pytree
        return list(enumerate(node))
    if type(node) is dict:
        return list(node.items())
    _make_known(node)
    paths, structure = pytree.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    return None if structure.is_leaf() else [(_key_of(path[0]), child) for path, child in paths]


def _key_of(entry: Any) -> Any:
    """The index, key or attribute that an entry of a pytree's path stands for."""
    return next(getattr(entry, name) for name in ("idx", "key", "name") if hasattr(entry, name))


def known_to_pytree(batch: Any) -> Any:
    """Let pytree look into all parts of a batch; returns the batch."""
    for _ in named_parts(batch):
        pass
    return batch


def dataclasses_known_to_pytree(output: Any) -> None:
    """Let pytree look into dataclasses that a module returns."""
    for leaf in pytree.tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))


def _make_known(node: Any) -> None:
    """Let pytree look into mappings such as `BatchEncoding`, dataclasses, and objects with a method `to`."""
    kind = type(node)
    if kind in pytree.SUPPORTED_NODES or isinstance(node, torch.Tensor | nn.Module | type | tuple):
        return
    if dataclasses.is_dataclass(node):
        _register(kind, lambda item: {field.name: getattr(item, field.name) for field in dataclasses.fields(item)})
    elif isinstance(node, Mapping):
        _register(kind, dict, lambda values: kind(values))
    elif callable(getattr(node, "to", None)) and own_attributes(node) is not None:
        _register(kind, lambda item: dict(vars(item)))


def _register(
    kind: type, take_apart: Callable[[Any], Mapping[Any, Any]], put_together: Callable[[Any], Any] | None = None
) -> None:
    def flatten(item: Any) -> tuple[list[Any], list[Any]]:
        parts = take_apart(item)
        return list(parts.values()), list(parts)

    def flatten_with_keys(item: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
        parts = take_apart(item)
        return [(pytree.MappingKey(name), value) for name, value in parts.items()], list(parts)

    def unflatten(values: Any, names: list[Any]) -> Any:
        parts = dict(zip(names, values, strict=True))
        return put_together(parts) if put_together is not None else _with_attributes(kind, parts)

    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


def _with_attributes(kind: type, attributes: Mapping[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made
