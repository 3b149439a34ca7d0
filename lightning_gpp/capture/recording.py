"""The recording: calls of functions and of modules, references to the values between them, and what they refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from lightning_gpp._compat.torch import pytree, storage_id
from lightning_gpp.capture.attributes import Attribute
from lightning_gpp.graph import Affine
from lightning_gpp.runtime.named_tensors import tensors_of

CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and other arguments of a call."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Output number `output` of recorded call number `call`."""

    call: int
    output: int = 0


@dataclass(frozen=True, slots=True)
class StateRef:
    """A parameter or buffer, by its canonical name."""

    name: str


@dataclass(frozen=True, slots=True)
class ModuleRef:
    """A submodule, by its path."""

    path: str


@dataclass(frozen=True, slots=True)
class AffineSize:
    """An integer that depends on the number of samples."""

    value: Affine


@dataclass(frozen=True, slots=True)
class CallModes:
    """The modes of a call that differ from those of the step; None: as the step."""

    grad: bool
    autocast: tuple[tuple[str, bool, Any], ...]
    """(device type, enabled, dtype)"""
    attention: tuple[SDPBackend, ...]
    """The kernels that may compute attention."""

    @staticmethod
    def current() -> CallModes:
        """The modes of the code that runs now."""
        cast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return CallModes(torch.is_grad_enabled(), cast, tuple(kernel for kernel, allowed in _ATTENTION if allowed()))


_ATTENTION: Final[tuple[tuple[SDPBackend, Callable[[], bool]], ...]] = (
    (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
    (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled),
)


@dataclass(slots=True)
class Recorded:
    """A call of a function. `args` and `kwargs` are trees of values with references instead of tensors.

    `outputs`: (sizes, dtype, requires_grad) of each recorded output. The first `num_returned` are the tensor leaves of
    the result, the rest are earlier values (`mutated`) after this call changed them in place. `scope`: number of the
    module call that it belongs to; -1 at the level of the step.
    """

    index: int
    function: Callable[..., Any]
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scope: int
    line: str
    context: CallModes
    checkpoint: int | None = None
    outputs: list[tuple[tuple[int, ...], str, bool]] = field(default_factory=list)
    result: Any = None
    mutated: list[Ref] = field(default_factory=list)
    overwritten: list[Ref] = field(default_factory=list)
    """Values before this call changed them in place, returned ones included."""
    num_returned: int = 0
    flops: float = 0
    saved: dict[int, int] = field(default_factory=dict)
    """Bytes of every storage that autograd keeps for this call, by the id of the storage."""
    saved_bytes: float = 0
    """Bytes of the storages that no earlier call keeps."""
    random: bool = False
    held: tuple[str, ...] = ()
    """Parameters and buffers that it uses besides its arguments."""
    step_number: int = -1
    """Index among the step's own calls on network values; -1 inside modules."""

    _leaves: list[Any] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the arguments."""
        if self._leaves is None:
            self._leaves = pytree.tree_leaves((self.args, self.kwargs))
        return self._leaves

    def refs(self) -> list[Ref]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Ref)] + self.mutated

    def states(self) -> list[str]:
        return [*(leaf.name for leaf in self.leaves if isinstance(leaf, StateRef)), *self.held]


def calls_behind(refs: Iterable[Ref], calls: Sequence[Recorded]) -> list[Recorded]:
    """Those of the calls, the last one first, on whose results these values depend."""
    wanted, found = {ref.call for ref in refs}, list[Recorded]()
    for call in reversed(calls):
        if call.index in wanted:
            found.append(call)
            wanted.update(ref.call for ref in call.refs())
    return found


@dataclass(slots=True)
class ModuleCall:
    """A call of a module. The recorded calls inside are `first` to `last` (exclusive); `parent` is the enclosing call.

    `result`: its answer with references instead of tensors.
    """

    number: int
    path: str
    parent: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: CallModes
    line: str
    first: int
    checkpoint: int | None = None
    last: int = -1
    result: Any = None


class Event(Enum):
    """The kinds of notes, each with what its subject is."""

    READS_VALUE = "the method by which the step reads a value of the network"
    READS_TRUTH = "the number of the truth value that the step reads, in the order of these"
    READS_RUN_TIME = "the attribute of the trainer that is read, such as `current_epoch`"
    READS_ATTRIBUTE = "the attribute of a module that the step reads first now"
    READS_UNIFORM = "the number of the leaf of the batch, all elements of which are the same, whose value is read"
    CHANGES_STATE = "the name of the parameter or buffer that is changed in place"
    HOOKS_GRADIENT = "the method that acts on the gradient of a tensor of the step"
    UPDATES_METRIC = "the place of the metric that the step itself updates"
    LOGS = "nothing"


@dataclass(frozen=True, slots=True)
class Note:
    """Something besides calls that happens in a recording, by a module call (`scope`), or by the step itself (-1).

    `num_modules`, `num_calls`: calls of modules and of functions before it.
    """

    event: Event
    subject: Any
    scope: int
    line: str
    num_modules: int
    num_calls: int


@dataclass(slots=True)
class Recording:
    """One run of the user's step on fake tensors of `num_samples` samples."""

    num_samples: int
    ambient: CallModes
    calls: list[Recorded] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    examples: dict[int, torch.Tensor] = field(default_factory=dict)
    """The tensors of the example batch, perhaps without memory, by the index of the call that represents them."""
    uniform: dict[int, int] = field(default_factory=dict)
    """Numbers of the leaves of the batch whose values are known, by the index of the call that represents them."""
    result: Any = None
    """The result of the step, with references instead of tensors."""
    returned: Any = None
    """The result itself."""
    complete: bool = True
    """True if the recording reached the end of the step; otherwise `stopped` says where it ended."""
    stopped: str = ""
    left: list[str] = field(default_factory=list)
    """Parameters and buffers that the step may use after the recording ended."""
    notes: list[Note] = field(default_factory=list)
    """All that happens besides calls, in its order."""
    attributes: dict[int, dict[Attribute, Any]] = field(default_factory=dict)
    """Attributes of modules that a forward or the step reads, with their values, by its scope."""
    touched: set[str] = field(default_factory=set)
    """Paths of the modules of which the step itself reads attributes, or somebody sets some."""
    set_by_step: dict[Attribute, str] = field(default_factory=dict)
    """Numbers, flags and texts that the step reads and then sets to others, with the line."""
    decisive: dict[Attribute, Any] = field(default_factory=dict)
    """Numbers of the step on which its network may depend."""
    changes_batch: bool = False
    """True if the step, or a forward, changes tensors of the mini-batch in place."""

    def note(self, event: Event, subject: Any = None, scope: int = -1, line: str = "") -> None:
        """Note something that happens now."""
        self.notes.append(Note(event, subject, scope, line, len(self.modules), len(self.calls)))

    def noted(self, event: Event) -> list[Note]:
        """The notes of a kind."""
        return [each for each in self.notes if each.event is event]

    def early(self, event: Event) -> list[Note]:
        """Those of the step itself, up to its last network call."""
        last = self._last_network_call()
        return [each for each in self.noted(event) if each.scope == -1 and each.num_modules <= last]

    def note_decision(self, scope: int, read: Any) -> None:
        """Note from which uniform tensors of the batch the values come that are being read: a tree with references."""
        refs = [ref for ref in pytree.tree_leaves(read) if isinstance(ref, Ref)] if self.uniform else []
        behind = {call.index for call in calls_behind(refs, self.calls)} if refs else set()
        for leaf in {leaf for index, leaf in self.uniform.items() if index in behind}:
            self.note(Event.READS_UNIFORM, leaf, scope)

    def decided_by(self) -> set[int]:
        """Numbers of the leaves of the batch by whose values forwards decide, and the step before its network ends."""
        forwards = [each for each in self.noted(Event.READS_UNIFORM) if each.scope != -1]
        return {each.subject for each in (*forwards, *self.early(Event.READS_UNIFORM))}

    def _last_network_call(self) -> int:
        return max((call.number for call in self.modules if call.parent == -1), default=-1)

    def called(self, scope: int) -> list[str]:
        """Paths of a module call and of those around it, the innermost first."""
        paths = []
        while scope != -1:
            paths.append(self.modules[scope].path)
            scope = self.modules[scope].parent
        return paths

    def network(self, scope: int) -> int:
        """The number of the network call that a module call is in; -1 for the step itself."""
        while scope != -1 and self.modules[scope].parent != -1:
            scope = self.modules[scope].parent
        return scope

    def network_calls(self) -> list[ModuleCall]:
        """The calls of modules by the step itself."""
        return [call for call in self.modules if call.parent == -1]

    def results(self) -> set[Any]:
        """References to the results of these calls."""
        return {leaf for call in self.network_calls() for leaf in pytree.tree_leaves(call.result)}


@dataclass(frozen=True)
class FunctionApply:
    """A custom autograd function as a callable, so that a replay keeps its backward."""

    function: type[torch.autograd.Function]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def target_of(func: Callable[..., Any], name: str) -> str:
    if name in ("__get__", "__set__"):
        return f"Tensor.{getattr(func.__self__, '__name__', '')}.{name}"  # type: ignore[attr-defined]
    return name


def target_of_apply(cls: type) -> str:
    """The target of a call of a custom autograd function."""
    return f"{cls.__name__}.apply"


_BACKWARDS: Final[Sequence[Callable[..., Any]]] = (
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
)


def differentiates(call: Recorded) -> bool:
    """True for a call by which a forward runs backwards."""
    return call.scope != -1 and call.function in _BACKWARDS


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
        for name, tensor in tensors_of(module).items():
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
