"""Derived tensors: those that a forward computes from parameters alone follow the parameters until the backward.

A policy that writes other values into the parameters for a backward relies on autograd's pointers into their memory.
Autograd also saves tensors in memory of their own that were computed from parameters: autocast's casts, the weight that
weight normalisation makes, a cast of a slice. So the operators that made them are noted, and run again before the
backward, into the same memory:

    forward     w16 = w.to(bfloat16)      y = x @ w16            autograd saves x and w16
    update      w changes
    backward    w16.copy_(w.to(bfloat16))                        then the gradient of x is that of the new w

Views need nothing: they are in the memory of what they are a view of. Results that depend on anything else than
parameters, buffers and constants are activations, and stay as they are. Random numbers are drawn again alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import TorchDispatchMode, parameters_of, storage_id
from lightning_gpp.runtime.operands import changed_by, tensors_in
from lightning_gpp.runtime.random import current_generators, undisturbed
from lightning_gpp.runtime.stage import MicroBatch, StageForward, StageModule


@dataclass(frozen=True, slots=True)
class _Step:
    """A call of an operator; `memory` has its results, or the arguments that it changes in place."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    memory: Sequence[Tensor]
    random: Sequence[tuple[torch.Generator, Tensor]]

    def run(self) -> None:
        """Compute the results again."""
        for generator, state in self.random:
            generator.set_state(state)
        results = self.function(*self.args, **self.kwargs)
        for tensor, again in zip(self.memory, tensors_in([results]), strict=False):
            if storage_id(tensor) != storage_id(again):
                tensor.copy_(again)


class Derived:
    """The tensors that one forward of a stage derives from its parameters; reusable for the next micro-batch.

    `kind`: says whether any forward of the stage derives some.
    """

    def __init__(self, stage: StageModule, kind: Derives) -> None:
        self._stage, self._kind = stage, kind
        self._steps: list[_Step] = []
        self.memory: dict[int, Tensor] = {}

    def noting(self, forward: StageForward) -> StageForward:
        """The stage's forward, whose derived tensors are noted; the stage hands on copies of them."""

        def run(values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
            if not self._kind.any:
                return forward(values, micro_batch)
            notes = _Notes(self._stage.parts)
            self.memory = notes.derived
            with notes:
                outputs = forward(values, micro_batch)
            copied = {name: tensor.clone() for name, tensor in outputs.items() if notes.made(tensor)}
            self._steps, self._kind.any = notes.steps, bool(notes.steps or copied)
            return {**outputs, **copied}

        return run

    def renewing(self, backward: Callable[[], object]) -> Callable[[], None]:
        """A backward before which the tensors are derived again, from the values that the parameters have then."""

        def run() -> None:
            if self._steps:
                with torch.no_grad(), undisturbed():
                    for step in self._steps:
                        step.run()
            backward()
            self.clear()

        return run

    def clear(self) -> None:
        """Drop every tensor."""
        self._steps, self.memory = [], {}


@dataclass(slots=True)
class Derives:
    """Says if forwards of a stage derive tensors from parameters; if its first one did not, later ones do not."""

    any: bool = True


class _Notes(TorchDispatchMode):
    """Notes the calls that compute with nothing but parameters, buffers of these modules, and constants.

    Attributes:
        derived: what depends on parameters, and the parameters, by memory.
        steps: the calls that made it.
        paused: whether nothing is noted.
    """

    paused: ClassVar[bool] = False

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parts = list(parts)
        given = [t for part in parts for t in tensors_in((*vars(part).values(), *_members(part)))]
        trained = [p for part in parts for p in parameters_of(part).values() if p is not None and p.requires_grad]
        self._known = {storage_id(tensor): tensor.untyped_storage() for tensor in given if _has_memory(tensor)}
        self._given = frozenset(self._known)
        self.derived = {storage_id(parameter): parameter.data for parameter in trained}
        self.steps: list[_Step] = []

    def made(self, tensor: Tensor) -> bool:
        """True if a tensor is derived from parameters, or is one."""
        return _has_memory(tensor) and storage_id(tensor) in self.derived

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        reads, writes = list(tensors_in((*args, *kwargs.values()))), changed_by(func, args, kwargs)
        if not all(_has_memory(tensor) and storage_id(tensor) in self._known for tensor in reads):
            self._forget(writes)
            return func(*args, **kwargs)
        depends = any(map(self.made, reads))
        is_random = depends and torch.Tag.nondeterministic_seeded in func.tags
        random = [(generator, generator.get_state()) for generator in current_generators()] if is_random else []
        result = func(*args, **kwargs)
        results = () if writes else tensors_in([result])  # a call that changes a tensor may give it other memory (set_)
        new = [t for t in results if _has_memory(t) and storage_id(t) not in self._known]
        self._known.update({storage_id(tensor): tensor.untyped_storage() for tensor in new})
        changed = [tensor for tensor in writes if storage_id(tensor) not in self._given]
        if depends and (new or changed):
            self.derived.update({storage_id(tensor): tensor.data for tensor in (*new, *changed)})
            memory = [tensor.data for tensor in writes or tensors_in([result])]
            self.steps.append(_Step(func, _plain(args), _plain(kwargs), memory, random))
        return result

    def _forget(self, changed: Iterable[Tensor]) -> None:
        """Take tensors for activations from now on, because a call wrote something else into them."""
        for key in {storage_id(tensor) for tensor in changed if _has_memory(tensor)} - self._given:
            self._known.pop(key, None)
            if self.derived.pop(key, None) is not None:
                self.steps = [step for step in self.steps if key not in map(storage_id, step.memory)]


@contextmanager
def unnoted() -> Iterator[None]:
    """Inside, nothing is noted: for code that runs again in the backward, which derives its tensors then."""
    before, _Notes.paused = _Notes.paused, True
    try:
        yield
    finally:
        _Notes.paused = before


def _members(part: nn.Module) -> Iterator[Tensor | None]:
    yield from part.parameters(recurse=False)
    yield from part.buffers(recurse=False)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _plain(values: Any) -> Any:
    """The arguments of a call; tensors without their history, in the same memory."""
    if isinstance(values, Tensor):
        return values.data
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    return type(values)(map(_plain, values)) if type(values) in (list, tuple) else values
