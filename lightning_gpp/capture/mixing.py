"""Values that mix samples: they depend on the data, but have no dimension that counts samples (a mean, a loss, `x[0]`).

Replicas that share a micro-batch would each compute a different value, and so would a stage with smaller micro-batches.
Nothing says which of them is right, or how to combine them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.network import Network
from lightning_gpp.capture.recording import Recorded, Ref
from lightning_gpp.graph import TensorSpec

SHAPE_READERS: Final = frozenset(
    (
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "positions"),
    )
)
"""Functions that read the shape, dtype and device of their arguments, but not their values."""

FIRST_READERS: Final = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})
"""Functions that read the values of their first argument only."""


def mark_mixing(
    network: Network, specs: Sequence[Sequence[TensorSpec]], inputs: Sequence[TensorSpec]
) -> list[list[TensorSpec]]:
    """The specs of all calls' outputs, with `mixes_samples` set on those that do."""
    dependent = {Ref(-1 - number) for number, spec in enumerate(inputs) if spec.varies}
    marked: list[list[TensorSpec]] = []
    for call, outputs in zip(network.calls, specs, strict=True):
        reads_samples = not dependent.isdisjoint(_read(call))
        marked.append([replace(spec, mixes_samples=reads_samples and _lacks_samples(spec)) for spec in outputs])
        if reads_samples:
            dependent.update(Ref(call.index, output) for output in range(len(outputs)))
        else:
            dependent.update(Ref(call.index, output) for output, spec in enumerate(outputs) if spec.varies)
    return marked


def _lacks_samples(spec: TensorSpec) -> bool:
    """True if no dimension of the tensor counts samples, or several do, which pairs every sample with every other."""
    return sum(bool(dim.per_sample) for dim in spec.shape) != 1


def _read(call: Recorded) -> Iterable[Ref]:
    """References to the values that a call reads."""
    if call.target in SHAPE_READERS:
        return ()
    values: Any = (call.args[:1], call.mutated) if call.target in FIRST_READERS else (call.args, call.kwargs)
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Ref)] + call.mutated
