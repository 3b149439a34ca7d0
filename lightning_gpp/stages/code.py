"""The Python source of a stage: calls of modules that are in the stage entirely, and recorded calls elsewhere.

def forward(values, b):
    input0 = values["input0"]
    v3_0 = image_tower__0(input0)
    v9_0 = cat__0([v3_0, v7_0], 1)
    return {"v9_0": v9_0}

Names of values have one underscore before the number, names of the user's modules and functions two. A user's words
become source only as identifiers in ASCII or as string literals; everything else is bound to a name.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from keyword import iskeyword
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.attributes import Attribute
from lightning_gpp.capture.merge import Opaque
from lightning_gpp.capture.network import Network
from lightning_gpp.capture.recording import AffineSize, CallModes, Event, ModuleCall, ModuleRef, Recorded, Ref, StateRef
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import CaptureError
from lightning_gpp.graph import TensorSpec
from lightning_gpp.runtime.recompute import recomputed


def variable(ref: Ref) -> str:
    """The name of a value in the source and as a slot."""
    return f"input{-1 - ref.call}" if ref.call < 0 else f"v{ref.call}_{ref.output}"


@dataclass
class StageCode:
    """Writes the source of one stage.

    Args:
        mine: numbers of the recorded calls of this stage.
        received: values from other stages or the source.
        wanted: values that other stages or the step read.
        specs: the shape and dtype of a value.
        recomputed: paths of modules; the largest modules inside of them that the stage calls as a whole keep only their
            inputs for the backward.
        unneeded: numbers of the recorded calls that no stage runs, because nothing reads their results.
    """

    network: Network
    module: nn.Module
    mine: set[int]
    received: list[Ref]
    wanted: list[Ref]
    specs: Callable[[Ref], TensorSpec]
    recomputed: tuple[str, ...] = ()
    unneeded: Set[int] = frozenset()
    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    used_states: set[str] = field(default_factory=set)
    modules: list[str] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    frozen: dict[Attribute, Any] = field(default_factory=dict)
    """Attributes that forwards read which are cut, with their values."""
    unread: set[Ref] = field(default_factory=set)
    """Arguments of the module being called whose values nothing inside reads."""
    temporaries: int = 0

    def compile(self) -> FunctionType:
        for ref in self.received:
            self._receive(ref)
        self._emit(-1, 0, len(self.network.calls))
        missing = [variable(ref) for ref in self.wanted if variable(ref) not in self.defined]
        if missing:
            raise CaptureError(
                f"Values {missing} are read by other stages, but are inside a module that cannot be cut."
            )
        results = ", ".join(f"{variable(ref)!r}: {self._sent(ref)}" for ref in self.wanted)
        self.lines.append(f"return {{{results}}}")
        return compiled(self.source(), self.names)

    def source(self) -> str:
        return "def forward(values, b):\n" + "\n".join(f"    {line}" for line in _release(self.lines))

    def _receive(self, ref: Ref) -> None:
        name = variable(ref)
        # A received tensor is a leaf of autograd, which must not be changed in place.
        copy = ".clone()" if any(ref in self.network.calls[number].overwritten for number in self.mine) else ""
        self.lines.append(f"{name} = values[{name!r}]{copy}")
        self.defined.add(name)

    def _sent(self, ref: Ref) -> str:
        return f"{variable(ref)}__kept" if self._keeps(ref) else variable(ref)

    def _keeps(self, ref: Ref) -> bool:
        """True if a value must be copied for others, because this stage changes it in place afterwards."""
        return ref.call >= 0 and any(ref in self.network.calls[number].overwritten for number in self.mine)

    # --- structure

    def _emit(self, scope: int, first: int, last: int) -> None:
        """Emit the calls directly inside a module call (or the step, scope -1), in recorded order."""
        children = [m for m in self.network.modules if m.parent == scope and first <= m.first and m.last <= last]
        calls = [c for c in self.network.calls[first:last] if c.scope == scope and c.index in self.mine]
        items: list[ModuleCall | Recorded] = [*children, *calls]
        items.sort(
            key=lambda item: (item.first, item.number) if isinstance(item, ModuleCall) else (item.index, 1 << 60)
        )
        for item in items:
            if isinstance(item, Recorded):
                self._emit_call(item)
            elif any(number in self.mine for number in range(item.first, item.last)):
                self._emit_module(item)

    def _emit_module(self, call: ModuleCall) -> None:
        inside = set(range(call.first, call.last))
        if inside <= self.mine | self.unneeded and not self._has_recomputed(call.path) and self._whole(call, inside):
            self._call_module(call, inside)
        else:
            self._check_cut(call)
            self.frozen |= self.network.recording.attributes.get(call.number, {})
            self._emit(call.number, call.first, call.last)

    def _whole(self, call: ModuleCall, inside: set[int]) -> bool:
        """True if the original module can be called: it reads its arguments, and only its result is read outside.

        It reads more where its weights are results of others (torch.func.functional_call).
        """
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        given = {ref for ref in self._refs_of(inside) if ref.call not in inside}
        if any(variable(ref) not in self.defined for ref in given):
            return False  # a calculation that no stage runs reads it, and the module would
        if any(isinstance(leaf, Opaque) for leaf in leaves) or given - {leaf for leaf in leaves if _is_ref(leaf)}:
            return False
        returned = {leaf for leaf in pytree.tree_leaves(call.result) if isinstance(leaf, Ref)}
        outside = [c for c in self.network.calls[call.last :] if c.index not in inside]
        read = {ref for c in outside for ref in c.refs() if ref.call in inside}
        read |= {ref for ref in (*self.wanted, *self.network.needed) if ref.call in inside}
        return all(ref in returned or self._is_alias(ref) for ref in read)

    def _refs_of(self, numbers: Iterable[int]) -> set[Ref]:
        return {ref for number in numbers for ref in self.network.calls[number].refs()}

    def _is_alias(self, ref: Ref) -> bool:
        return ref.output >= self.network.calls[ref.call].num_returned

    def _check_cut(self, call: ModuleCall) -> None:
        recording = self.network.recording
        for note in recording.noted(Event.READS_RUN_TIME):
            if note.scope == call.number:
                raise refusal(
                    note.line,
                    f"`{note.subject}` is read in a forward that is cut into stages, where its value would be frozen",
                    "read it in the step, and pass it to the module as a tensor",
                )
        for note in recording.noted(Event.LOGS):
            if note.scope == call.number:
                reason = "a forward that is cut into stages logs a value"
                raise refusal(note.line, reason, "return the value and log it in the step")

    # --- lines

    def _call_module(self, call: ModuleCall, inside: set[int]) -> None:
        target = self._name(call.path or "module", self.module.get_submodule(call.path))
        self.modules.append(call.path)
        self.used_states |= {name for number in inside for name in self.network.calls[number].states()}
        if call.checkpoint is not None and self._region_of(call.parent) != call.checkpoint:
            target = self._name("checkpoint", functools.partial(checkpoint, self.names[target], use_reentrant=False))
        elif call.checkpoint is None and self._is_recomputed(call.path):
            block = self.names[target]
            target = self._name("again", recomputed(block, block.modules()))
        arguments = pytree.tree_leaves((call.args, call.kwargs))
        self.unread = {leaf for leaf in arguments if _is_ref(leaf)} - self._refs_of(inside)
        self._assign(call, target, sorted(inside), pytree.tree_leaves(call.result))
        self.unread = set()

    def _is_recomputed(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{block}.") for block in self.recomputed)

    def _has_recomputed(self, path: str) -> bool:
        """True if a block to recompute is inside a module, but not the entire module."""
        return any(block.startswith(f"{path}." if path else "") for block in self.recomputed)

    def _region_of(self, scope: int) -> int | None:
        return self.network.modules[scope].checkpoint if scope >= 0 else None

    def _emit_call(self, call: Recorded) -> None:
        if any(isinstance(leaf, Opaque) for leaf in pytree.tree_leaves((call.args, call.kwargs))):
            raise refusal(
                call.line,
                f"`{call.target}` takes an object that every run creates anew, in a forward that is cut into stages",
                "keep the module that makes the object in one stage (list it in strategy.stages)",
            )
        if call.checkpoint is not None and self._region_of(call.scope) != call.checkpoint:
            raise refusal(
                call.line,
                "activation checkpointing spans more than one module call in a forward that is cut into stages, "
                "and would be lost",
                "checkpoint entire submodules: checkpoint(self.block, x)",
            )
        self.used_states |= set(call.states())
        target = self._name(call.target, call.function)
        self._assign(call, target, [call.index], [Ref(call.index, number) for number in range(len(call.outputs))])

    def _assign(self, call: ModuleCall | Recorded, target: str, numbers: list[int], results: list[Any]) -> None:
        """Emit a call, and the names of its results. `numbers`: of the recorded calls that it stands for."""
        simple = isinstance(call.result, Ref)
        name = variable(call.result) if simple else self._temporary()
        self._line(f"{name} = {target}({self._arguments(call.args, call.kwargs)})", call.context)
        if simple:
            self.defined.add(name)
        else:
            self._unpack(name, call.result)
        self._alias_outputs(numbers)
        for ref in results:
            self._keep(ref)

    def _unpack(self, result: str, tree: Any) -> None:
        refs = [(i, leaf) for i, leaf in enumerate(pytree.tree_leaves(tree)) if isinstance(leaf, Ref)]
        flat = isinstance(tree, tuple | list) and all(isinstance(item, Ref) for item in tree)
        if refs and not flat:
            self.names["leaves"] = pytree.tree_leaves
            self.lines.append(f"{result} = leaves({result})")
        for position, ref in refs:
            self.lines.append(f"{variable(ref)} = {result}[{position}]")
            self.defined.add(variable(ref))

    def _alias_outputs(self, numbers: Iterable[int]) -> None:
        """Name values that a call changed in place; the object stays the same."""
        for number in numbers:
            call = self.network.calls[number]
            for position, before in enumerate(call.mutated):
                if variable(before) in self.defined:
                    name = variable(Ref(number, call.num_returned + position))
                    self.lines.append(f"{name} = {variable(before)}")
                    self.defined.add(name)

    def _keep(self, ref: Any) -> None:
        if isinstance(ref, Ref) and ref in self.wanted and self._keeps(ref):
            self.lines.append(f"{variable(ref)}__kept = {variable(ref)}.clone()")

    def _line(self, text: str, context: CallModes) -> None:
        ambient = self.network.recording.ambient
        if context == ambient:
            self.lines.append(text)
        else:
            manager = self._name("context", functools.partial(_modes, context, ambient))
            self.lines.append(f"with {manager}(): {text}")

    # --- expressions

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        parts = [self._expression(arg) for arg in args]
        parts += [f"{name}={self._expression(value)}" for name, value in kwargs.items() if _is_name(name)]
        others = {name: value for name, value in kwargs.items() if not _is_name(name)}
        return ", ".join([*parts, *([f"**{self._container(others)}"] if others else [])])

    def _expression(self, value: Any) -> str:
        if isinstance(value, Ref):
            return (
                self._shape_of(value)
                if value in self.unread and variable(value) not in self.defined
                else variable(value)
            )
        if isinstance(value, StateRef):
            return self._state(value.name)
        if isinstance(value, AffineSize):
            return f"({int(value.value.per_sample)} * b + {int(value.value.fixed)})"
        if isinstance(value, ModuleRef):
            return self._name("module", self.module.get_submodule(value.path))
        if value is None or value is Ellipsis or type(value) in (bool, int, str):
            return repr(value)
        return self._container(value)

    def _shape_of(self, ref: Ref) -> str:
        """A value that nothing reads, of which a module may ask the shape."""
        return f"{self._name('unread', Shaped(self.specs(ref)))}(values, b)"

    def _container(self, value: Any) -> str:
        if type(value) is slice:
            return f"slice({', '.join(self._expression(x) for x in (value.start, value.stop, value.step))})"
        if type(value) in (list, tuple):
            items = "".join(f"{self._expression(item)}, " for item in value)
            return f"[{items}]" if type(value) is list else f"({items})"
        if type(value) is dict:
            return "{" + ", ".join(f"{self._key(k)}: {self._expression(v)}" for k, v in value.items()) + "}"
        leaves, structure = pytree.tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return self._name("constant", value)
        self.names["unflatten"] = pytree.tree_unflatten
        return f"unflatten([{', '.join(map(self._expression, leaves))}], {self._name('structure', structure)})"

    def _key(self, key: Any) -> str:
        return repr(key) if type(key) in (bool, int, str) else self._name("key", key)

    def _state(self, name: str) -> str:
        owner, _, attribute = name.rpartition(".")
        self.used_states.add(name)
        self.names["getattr"] = getattr
        return f"getattr({self._name('owner', self.module.get_submodule(owner))}, {attribute!r})"

    def _name(self, stem: str, value: Any) -> str:
        """A name for a value in the namespace of the source, as close to `stem` as an identifier can be."""
        prefix = re.sub(r"^(?=\d)|[^0-9A-Za-z_]", "_", stem)
        name = next(name for number in count() if (name := f"{prefix}__{number}") not in self.names)
        self.names[name] = value
        return name

    def _temporary(self) -> str:
        """A name for a result that is not a single tensor."""
        self.temporaries += 1
        return f"out_{self.temporaries}"


def compiled(source: str | ast.Module, names: dict[str, Any]) -> FunctionType:
    """The function of a stage's source, which takes its inputs by name and the number of samples."""
    exec(compile(source, "<stage>", "exec"), names)
    # Were it among its own globals, this cycle would keep the parameters until Python looks for cycles.
    forward: FunctionType = names.pop("forward")
    return forward


class Shaped:
    """Makes tensors of a shape that take no memory, on the device of the stage, from a zero that it keeps."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec, self._zero = spec, torch.zeros((), dtype=getattr(torch, spec.dtype))

    def __call__(self, values: dict[str, torch.Tensor], num_samples: int) -> torch.Tensor:
        device = next((value.device for value in values.values()), self._zero.device)
        if self._zero.device != device:
            self._zero = self._zero.to(device)
        return self._zero.expand(self.spec.sizes(num_samples))


def _is_ref(leaf: Any) -> bool:
    return isinstance(leaf, Ref)


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier() and not iskeyword(text)


@contextmanager
def _modes(context: CallModes, ambient: CallModes) -> Any:
    """Enter the modes that the user's code set when a call was recorded: grad, kernels of attention, and autocast."""
    with ExitStack() as stack:
        if context.grad != ambient.grad:
            stack.enter_context(torch.set_grad_enabled(context.grad))
        if context.attention != ambient.attention:
            stack.enter_context(sdpa_kernel(list(context.attention)))
        for (device, enabled, dtype), before in zip(context.autocast, ambient.autocast, strict=True):
            if (device, enabled, dtype) != before and (device == "cpu" or torch.cuda.is_available()):
                manager: AbstractContextManager[Any] = torch.autocast(device, enabled=enabled, dtype=dtype)
                stack.enter_context(manager)
        yield


def _release(lines: list[str]) -> list[str]:
    """Delete every value after the line that reads it last, so that memory is freed as early as in eager code."""
    last: dict[str, int] = {}
    for number, line in enumerate(lines):
        for name in re.findall(r"\b(?:v\d+_\d+|input\d+|out_\d+)\b", line):
            last[name] = number
    ends: dict[int, list[str]] = {}
    for name, number in last.items():
        if not lines[number].startswith("return"):
            ends.setdefault(number, []).append(name)
    released: list[str] = []
    for number, line in enumerate(lines):
        released.append(line)
        if number in ends:
            released.append(" = ".join(ends[number]) + " = None")
    return released
