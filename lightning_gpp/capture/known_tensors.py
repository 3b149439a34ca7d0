"""The tensors and modules that a recording knows, and what it calls them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_gpp._compat.torch import pytree, storage_id
from lightning_gpp.capture.isolate import names_of
from lightning_gpp.capture.recording import ModuleRef, Ref, StateRef


class KnownTensors:
    """Knows results of calls, parameters, buffers and modules by identity, and keeps them alive: no other tensor gets
    the id or memory of one.
    """

    def __init__(self) -> None:
        self._values: dict[int, Ref] = {}
        self._states: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        self._alive: list[Tensor] = []
        self._hidden: set[int] = set()
        self._storages: dict[int, list[Tensor]] = {}
        self._state_storages: dict[int, str] = {}

    def watch(self, module: nn.Module) -> None:
        """Know a module with its parts, parameters and buffers."""
        for tensor, name in names_of(module):
            self._states[id(tensor)] = name
            self.keep(tensor)  # a forward may replace its buffer, and another tensor would get the id of the freed one
            self._state_storages[storage_id(tensor)] = name
        self._paths = {id(part): path for path, part in module.named_modules()}

    def add_states(self, module: nn.Module) -> None:
        """Take the memory of another module's parameters for that of states, which autograd keeps anyway."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.keep(tensor)
            self._state_storages.setdefault(storage_id(tensor), "")

    def states_of(self, module: nn.Module) -> tuple[str, ...]:
        """Names of the parameters and buffers of a watched module."""
        tensors = (*module.parameters(), *module.buffers())  # a buffer may be another one than when it was watched
        return tuple(self._states[id(tensor)] for tensor in tensors if id(tensor) in self._states)

    def states_in(self, tensors: Iterable[Tensor]) -> list[str]:
        """Names of the parameters and buffers in whose memory tensors are."""
        storages = map(storage_id, tensors)
        return [self._state_storages[storage] for storage in storages if storage in self._state_storages]

    def add(self, tensor: Tensor, ref: Ref) -> None:
        """Know a result of a call."""
        if id(tensor) in self._states:
            return
        if id(tensor) not in self._values:
            self.keep(tensor)
            self._storages.setdefault(storage_id(tensor), []).append(tensor)
        self._values[id(tensor)] = ref

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor alive, so that no other tensor gets its id or memory."""
        self._alive.append(tensor)

    def hide(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that a recorded call has computed and not returned."""
        for tensor in tensors:
            self.keep(tensor)
            self._hidden.add(id(tensor))

    def hides(self, tree: Any) -> bool:
        """True if one of those is in a tree."""
        return bool(self._hidden) and any(id(leaf) in self._hidden for leaf in pytree.tree_leaves(tree))

    def value(self, tensor: Tensor) -> Ref | None:
        """The result that a tensor is."""
        return self._values.get(id(tensor))

    def values(self, tensors: Iterable[Tensor]) -> list[Ref]:
        """The results among tensors."""
        return [self._values[id(tensor)] for tensor in tensors if id(tensor) in self._values]

    def aliases(self, changed: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Results that share memory with a changed tensor and are not among the outputs."""
        storages = {storage_id(tensor) for tensor in changed}
        returned = {id(tensor) for tensor in outputs}
        return [t for storage in storages for t in self._storages.get(storage, ()) if id(t) not in returned]

    def ref(self, leaf: Any) -> Any:
        """The reference to a known tensor or module; anything else as it is."""
        if isinstance(leaf, Tensor):
            if id(leaf) in self._states:
                return StateRef(self._states[id(leaf)])
            return self._values.get(id(leaf), leaf)
        if isinstance(leaf, nn.Module) and id(leaf) in self._paths:
            return ModuleRef(self._paths[id(leaf)])
        return leaf
