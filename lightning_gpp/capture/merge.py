"""Compares recordings: values that change with the number of samples become affine, values that change with Python's
run-time values are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.network import Network
from lightning_gpp.capture.recording import AffineSize, ModuleCall, Recorded
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import CaptureError
from lightning_gpp.graph import Affine, TensorSpec

_CHANGING = (
    "`batch_idx`, `current_epoch`, `global_step`, `dataloader_idx`, random numbers of Python or NumPy, a value that "
    "the step reads from a tensor, or one that it changes outside of the module"
)


class Opaque:
    """An argument that cannot be replayed: an object that every run creates anew."""

    def __init__(self, value: Any) -> None:
        self.type_name = type(value).__name__

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


def merge(base: Network, other_run: Network, other_size: Network) -> tuple[Network, list[list[TensorSpec]]]:
    """The network with affine sizes, and the specs of every call's outputs.

    Args:
        base: the recording to keep.
        other_run: a recording with the same number of samples and other `batch_idx`, `current_epoch`, `global_step` and
            random numbers.
        other_size: a recording with another number of samples, and the rest as in `base`.

    Raises:
        CaptureError: they differ in more than sizes.
    """
    _same_structure(base, other_run, _CHANGING)
    _same_structure(base, other_size, "the number of samples in the batch")
    sizes = (base.recording.num_samples, other_size.recording.num_samples)
    calls = []
    for triple in zip(base.calls, other_run.calls, other_size.calls, strict=True):
        try:
            calls.append(_merge_call(*triple, sizes))
        except CaptureError as error:
            error.modules = base.recording.called(triple[0].scope)
            raise
    modules = [
        _merge_module(*triple, sizes)
        for triple in zip(base.modules, other_run.modules, other_size.modules, strict=True)
    ]
    specs = [_specs(a, c, sizes) for a, c in zip(base.calls, other_size.calls, strict=True)]
    step = {
        name: fit(getattr(base, name).fixed, getattr(other_size, name).fixed, sizes)
        for name in ("step_flops", "step_saved_bytes")
    }
    return replace(base, calls=calls, modules=modules, **step), specs  # type: ignore[arg-type]


def only_scales(network: Network, specs: list[list[TensorSpec]]) -> bool:
    """True if all sizes are fixed, or whole multiples of the number of samples: they depend on nothing else then."""
    calls: list[Recorded | ModuleCall] = [*network.calls, *network.modules]
    leaves = pytree.tree_leaves([(call.args, call.kwargs) for call in calls])
    sizes = [leaf.value for leaf in leaves if isinstance(leaf, AffineSize)]
    sizes += [size for row in specs for spec in row for size in spec.shape]
    return all(not size.per_sample or (not size.fixed and isinstance(size.per_sample, int)) for size in sizes)


def input_specs(base: Network, other_size: Network) -> list[TensorSpec]:
    sizes = (base.recording.num_samples, other_size.recording.num_samples)
    pairs = zip(base.input_outputs, other_size.input_outputs, strict=True)
    return [_spec(a, c, sizes, "the batch") for a, c in pairs]


def fit(first: float, second: float, sizes: tuple[int, int]) -> Affine:
    """The affine function through two points."""
    slope = (second - first) / (sizes[1] - sizes[0])
    return Affine(_whole(slope), _whole(first - slope * sizes[0]))


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _same_structure(base: Network, other: Network, what: str) -> None:
    def signature(network: Network) -> list[Any]:
        return [(call.target, call.scope, len(call.outputs), call.num_returned) for call in network.calls]

    first, second = signature(base), signature(other)
    if base.inputs == other.inputs and first == second and len(base.modules) == len(other.modules):
        return
    differing = (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    number = next(differing, min(len(first), len(second)) - 1)
    line = base.calls[number].line if base.calls else "its first line"
    raise refusal(
        line,
        f"what the modules compute depends on {what}",
        "pass it as a tensor",
        base.recording.called(base.calls[number].scope) if base.calls else (),
    )


def _merge_call(a: Recorded, b: Recorded, c: Recorded, sizes: tuple[int, int]) -> Recorded:
    args, kwargs = _merge_tree((a.args, a.kwargs), (b.args, b.kwargs), (c.args, c.kwargs), sizes, a.line)
    if not (a.function == b.function == c.function):
        args = (Opaque(a.function),)
    flops, saved = fit(a.flops, c.flops, sizes), fit(a.saved_bytes, c.saved_bytes, sizes)
    return replace(a, args=args, kwargs=kwargs, flops=flops, saved_bytes=saved)  # type: ignore[arg-type]


def _merge_module(a: ModuleCall, b: ModuleCall, c: ModuleCall, sizes: tuple[int, int]) -> ModuleCall:
    args, kwargs = _merge_tree((a.args, a.kwargs), (b.args, b.kwargs), (c.args, c.kwargs), sizes, a.line)
    return replace(a, args=args, kwargs=kwargs)


def _merge_tree(a: Any, b: Any, c: Any, sizes: tuple[int, int], line: str) -> Any:
    leaves, structure = pytree.tree_flatten(a)
    others = [pytree.tree_leaves(tree) for tree in (b, c)]
    if any(len(other) != len(leaves) for other in others):
        return ((Opaque(a),), {})
    merged = [_merge_leaf(x, y, z, sizes, line) for x, y, z in zip(leaves, *others, strict=True)]
    return pytree.tree_unflatten(merged, structure)


def _merge_leaf(a: Any, b: Any, c: Any, sizes: tuple[int, int], line: str) -> Any:
    if type(a) is not type(b) or type(a) is not type(c):
        return Opaque(a)
    if isinstance(a, torch.Tensor):
        return a if a is b is c or _equal(a, b, c) else Opaque(a)
    if isinstance(a, bool | str | None):
        return _frozen(a, b, c, line)
    if isinstance(a, int):
        if a != b:
            raise _depends(line, f"the number {a} was {b}", _CHANGING)
        return a if a == c else AffineSize(fit(a, c, sizes))
    if isinstance(a, float | complex):
        return _frozen(a, b, c, line)
    if isinstance(a, nn.Module):
        return Opaque(a)
    return a if _same(a, b) and _same(a, c) else Opaque(a)


def _frozen(a: Any, b: Any, c: Any, line: str) -> Any:
    if not _same(a, b):
        raise _depends(line, f"the value {a!r} was {b!r}", _CHANGING)
    if not _same(a, c):
        raise _depends(line, f"the value {a!r} was {c!r}", "the number of samples in the batch")
    return a


def _depends(line: str, what: str, cause: str) -> CaptureError:
    return refusal(
        line,
        f"it computes with a Python value that depends on {cause} ({what} in another run), which would be frozen",
        "pass it to the module as a tensor",
    )


def _same(a: Any, b: Any) -> bool:
    if a is b or (isinstance(a, float) and a != a and b != b):
        return True
    try:
        return bool(a == b)
    except Exception:  # an object's __eq__ may raise anything; then it is not replayed
        return False


def _equal(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
    real = all(type(tensor) is torch.Tensor for tensor in (a, b, c))
    return real and torch.equal(a, b) and torch.equal(a, c)


def _specs(a: Recorded, c: Recorded, sizes: tuple[int, int]) -> list[TensorSpec]:
    return [_spec(x, y, sizes, a.line) for x, y in zip(a.outputs, c.outputs, strict=True)]


def _spec(
    a: tuple[tuple[int, ...], str, bool], c: tuple[tuple[int, ...], str, bool], sizes: tuple[int, int], line: str
) -> TensorSpec:
    if len(a[0]) != len(c[0]) or a[1] != c[1]:
        raise refusal(line, f"a tensor's rank or dtype depends on the number of samples ({a} and {c})", "keep it fixed")
    shape = tuple(fit(x, y, sizes) for x, y in zip(a[0], c[0], strict=True))
    return TensorSpec(shape=shape, dtype=a[1], requires_grad=a[2])
