"""Recomputation: a forward that keeps only its inputs, and the same forward again for the backward.

A whole stage runs again before its backward (`RecomputedForward`). A block of a stage runs again when the backward
reaches it (`recomputed`): then one block at a time needs memory, but no wait can be filled with it.

The first run of a stage has gradients enabled, too, and its graph is dropped: so code and kernels that depend on the
grad mode do the same both times (and draw the same random numbers), and every output shows whether it needs a gradient.
It takes no more memory than the second run.

The second run works on copies of the state of its modules (`ModuleState`): buffers that autograd saved, or that later
micro-batches changed, are not written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpp._compat.torch import buffers_of, version
from lightning_gpp.errors import GPPError
from lightning_gpp.runtime.operations import ComputeForward
from lightning_gpp.runtime.weights.derived import unnoted

SMALL: Final = 1 << 16
"""Tensors of at most this many elements are assumed to change in every forward: batch norm changes its running
statistics, a few numbers per channel, without raising their version counters. For larger ones the counter is trusted.
"""

_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})

Namespace = dict[str, Any]
"""The attributes of a module, or its buffers."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor of a module, its version, and a copy of it; a large copy is shared until the tensor changes."""

    tensor: Tensor
    version: int
    copy: Tensor

    def is_still(self, tensor: Any) -> bool:
        return tensor is self.tensor and version(self.tensor) == self.version

    @property
    def is_small(self) -> bool:
        return self.tensor.numel() <= SMALL


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that a forward read: numbers, strings and None by namespace, and tensors."""

    plain: list[tuple[Namespace, dict[str, Any]]]
    tensors: list[tuple[Namespace, str, Copied]]


class ModuleState:
    """Buffers of modules, and their attributes that are tensors without a gradient, numbers, strings or None.

    Args:
        modules: the modules, each without its submodules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._namespaces: list[Namespace] = [
            space for module in modules for space in (vars(module), buffers_of(module))
        ]
        self._copied: dict[int, Copied] = {}

    def snapshot(self) -> Snapshot:
        """The state before a forward. A large tensor is copied once, and again only after it changed."""
        copied: dict[int, Copied] = {}
        tensors = [(space, name, self._copy(tensor, copied)) for space, name, tensor in self._tensors()]
        self._copied = copied
        spaces = self._namespaces
        plain = [(space, {name: value for name, value in space.items() if type(value) in _PLAIN}) for space in spaces]
        return Snapshot(plain, tensors)

    @contextmanager
    def restored(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, modules have the state of the snapshot, afterwards the previous one; lists are shortened."""
        before = [(space, dict(space)) for space in self._namespaces]
        lists = [(value, len(value)) for _, values in before for value in values.values() if type(value) is list]
        _restore(snapshot)
        try:
            yield
        finally:
            for space, values in before:
                for name in space.keys() - values.keys():
                    del space[name]
                space.update(values)
            for items, length in lists:
                del items[length:]

    def _tensors(self) -> Iterator[tuple[Namespace, str, Tensor]]:
        for space in self._namespaces:
            for name, value in space.items():
                if isinstance(value, Tensor) and not value.requires_grad:
                    yield space, name, value

    def _copy(self, tensor: Tensor, copied: dict[int, Copied]) -> Copied:
        key = id(tensor)
        if key not in copied:
            known = self._copied.get(key)
            if known is None or known.is_small or not known.is_still(tensor):
                known = Copied(tensor, version(tensor), tensor.clone())
            copied[key] = known
        return copied[key]  # the same for all names of a tied tensor


def _restore(snapshot: Snapshot) -> None:
    for space, values in snapshot.plain:
        space.update(values)
    copies: dict[int, Tensor] = {}
    for space, name, one in snapshot.tensors:
        if one.is_small or not one.is_still(space.get(name)):
            key = id(one)
            if key not in copies:
                copies[key] = one.copy if one.is_small else one.copy.clone()
            space[name] = copies[key]


@dataclass(slots=True, kw_only=True, eq=False)
class RecomputedForward(ComputeForward):
    """Run a stage and keep its inputs; `run_again` comes before the backward. It changes the state of `modules`."""

    modules: ModuleState
    inputs: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    snapshot: Snapshot = Snapshot([], [])

    def run(self) -> None:
        self.inputs = self._inputs(self.saved)
        self.versions = {name: version(tensor) for name, tensor in self.inputs.items()}
        self.snapshot = self.modules.snapshot()
        outputs = self.forward(self.inputs, self.micro_batch)
        self.check(outputs, self.owner)
        self.hand_out(_without_graph(outputs))

    def run_again(self) -> None:
        """Make the graph, with the random numbers, buffers and attributes of the first run, which stay untouched."""
        self._check_inputs()
        with self.modules.restored(self.snapshot):
            outputs = self.forward(self.inputs, self.micro_batch)
        self.check(outputs, f"{self.owner}, recomputed,")
        self.clear()
        if self.saved is not None:
            self._save(self.saved, outputs)

    def clear(self) -> None:
        """Drop every tensor."""
        self.inputs, self.versions, self.snapshot = {}, {}, Snapshot([], [])

    def _check_inputs(self) -> None:
        changed = [name for name, tensor in self.inputs.items() if version(tensor) != self.versions[name]]
        if changed:
            raise GPPError(
                f"{self.owner} cannot be recomputed: its inputs {changed} were changed in place since its forward. Let "
                "the module that changes them work on a clone()."
            )


def _without_graph(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: output.detach().requires_grad_(output.requires_grad) for name, output in outputs.items()}


def recomputed(block: Callable[..., Any], modules: Iterable[nn.Module]) -> Callable[..., Any]:
    """Calls of a block that keep only their arguments, and run again in the backward.

    The second run has the random numbers of the first, and the buffers and attributes of `modules` (each without its
    submodules), which stay untouched.
    """
    state = ModuleState(modules)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        snapshot = state.snapshot()
        contexts = lambda: (unnoted(), state.restored(snapshot))  # noqa: E731
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run
