"""The recorder: notes the calls of the user's step as the user wrote them, of torch functions and of modules.

It works on fake tensors, which have shapes and dtypes, but need no memory or compute.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from lightning_gpp._compat.torch import FakeTensor, buffers_of, pytree, storage_id, version
from lightning_gpp.capture.attributes import OF_EVERY_MODULE
from lightning_gpp.capture.differentiated import differentiates
from lightning_gpp.capture.isolate import names_of
from lightning_gpp.capture.items import is_watched
from lightning_gpp.capture.known_values import KnownValues
from lightning_gpp.capture.recording import (
    CallModes,
    ChangeInPlace,
    ModuleCall,
    ModuleRef,
    Recorded,
    Recording,
    Ref,
    StateRef,
)
from lightning_gpp.capture.refusal import escaped, filled, read_items, refusal
from lightning_gpp.user_code import user_line
from lightning_gpp.wording import named

BATCH = "batch"
"""The target of recorded calls that represent tensors of the batch."""

_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "is_nonzero"}

_ATTENTION: Final[tuple[tuple[SDPBackend, Callable[[], bool]], ...]] = (
    (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
    (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled),
)

_GRADIENT_HOOKS = {"register_hook", "retain_grad"}


@dataclass(frozen=True)
class FunctionApply:
    """A custom autograd function as a callable, so that a replay keeps its backward."""

    function: type[torch.autograd.Function]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def current_context() -> CallModes:
    devices = ("cpu", "cuda")
    cast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
    attention = tuple(kernel for kernel, allowed in _ATTENTION if allowed())
    return CallModes(torch.is_grad_enabled(), cast, attention)


class Recorder(TorchFunctionMode):
    """Fills a `Recording`. Install with `watch(module)`, register the batch with `batch_tensor`, then enter it.

    Args:
        num_samples: samples of the batch.
        opened: paths of modules whose forward counts as a part of the step.
        refuted: numbers of truth values, read by the step, that are false; it cannot go on with others.
        number: what it reads from other tensors; recordings with different numbers show what depends on them.

    Attributes:
        reads_between_calls: whether the step may read values that the network computed, and call modules after it.
        runs_rest: whether it may call modules after the recording ended.
    """

    reads_between_calls = False
    runs_rest = True

    def __init__(
        self,
        num_samples: int,
        opened: Collection[str] = (),
        refuted: Collection[int] = (),
        number: int = 1,
    ) -> None:
        super().__init__()
        self.opened, self._refuted, self._number = opened, refuted, number
        self.recording = Recording(num_samples, current_context())
        self.values = KnownValues(on_read=self._note_read_by_call)
        self.current: Recorded | None = None
        self._values: dict[int, Ref] = {}
        self._states: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []
        self._hidden: set[int] = set()
        self._storages: dict[int, list[torch.Tensor]] = {}
        self._scopes: list[int | None] = []
        self._drawn: list[tuple[int, int]] = []
        self._arrived: tuple[list[Any], Any] = [], None
        """The leaves and the structure of the arguments of the present network call, as they arrived."""
        self._regions: list[int] = []
        self._num_regions = 0
        self._paused = False
        self.examples: dict[int, torch.Tensor] = {}
        self.uses: list[Ref] = []
        self.network: list[bool] = []
        self.state_storages: dict[int, str] = {}
        self.sources: dict[int, list[torch.Tensor]] = {}

    # --- modules

    def watch(self, module: nn.Module) -> None:
        for tensor, name in names_of(module):
            self._states[id(tensor)] = name
            self.keep(tensor)  # a forward may replace its buffer, and another tensor would get the id of the freed one
            self.state_storages[storage_id(tensor)] = name
        for path, child in module.named_modules():
            self._paths[id(child)] = path
            child.register_forward_pre_hook(functools.partial(self._enter, path), with_kwargs=True, prepend=True)
            child.register_forward_hook(functools.partial(self._leave, path), with_kwargs=True)

    @property
    def paused(self) -> bool:
        """True inside of a recorded call, whose own calls are not recorded."""
        return self._paused

    def add_states(self, module: nn.Module) -> None:
        """Take the memory of another module's parameters for that of states, which autograd keeps anyway."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.keep(tensor)
            self.state_storages.setdefault(storage_id(tensor), "")

    def states_of(self, module: nn.Module) -> tuple[str, ...]:
        """Names of the parameters and buffers of a watched module."""
        tensors = (*module.parameters(), *module.buffers())  # a buffer may be another one than when it was watched
        return tuple(self._states[id(tensor)] for tensor in tensors if id(tensor) in self._states)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[list[Exception]]:
        """Catch an error inside, and forget what the recorded call has cost so far. Yields a list for the error."""
        depth, failed = len(self._scopes), list[Exception]()
        try:
            yield failed
        except Exception as error:  # whatever torch raises where a fake tensor lacks a value
            failed.append(error)
            del self._scopes[depth:]
            if self.current is not None:
                self.current.flops, self.current.saved = 0, {}

    @property
    def scope(self) -> int:
        return next((scope for scope in reversed(self._scopes) if scope is not None), -1)

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.paused:
            self._scopes.append(None)
            return
        if self.scope == -1 and (path in self.opened or not _has_state(module)):
            self._scopes.append(None)
            return
        if self.scope == -1 and not self.reads_between_calls:
            self._refuse_late_network(path)
        self._take((args, kwargs))
        number = len(self.recording.modules)
        call = ModuleCall(
            number=number,
            path=path,
            parent=self.scope,
            args=self.refs(args),
            kwargs=self.refs(kwargs),
            context=current_context(),
            line=user_line(),
            first=len(self.recording.calls),
            checkpoint=self._regions[-1] if self._regions else None,
        )
        if call.parent == -1:
            self._arrived = pytree.tree_flatten((args, kwargs))
        self.recording.modules.append(call)
        self._scopes.append(number)
        self._drawn.append(_positions())

    def _leave(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        number = self._scopes.pop()
        if number is not None:
            call = self.recording.modules[number]
            call.last = len(self.recording.calls)
            register_dataclasses(output)
            if call.parent == -1:
                self._check_arguments(call, pytree.tree_flatten((args, kwargs)))
            call.result = self.refs(output)
            if self._drawn.pop() != _positions():
                raise refusal(
                    call.line,
                    f"{type(module).__name__} draws random numbers by other means than torch, which would be frozen",
                    "draw them by torch, and compute with tensors",
                    [path, *self.recording.called(self.scope)],
                )

    def _check_arguments(self, call: ModuleCall, now: tuple[list[Any], Any]) -> None:
        """Refuse a network call that has put something into containers among its arguments."""
        (leaves, structure), (present, other) = self._arrived, now
        if structure != other or any(leaf is not known for leaf, known in zip(present, leaves, strict=True)):
            raise filled(call.line, call.path)

    def _refuse_late_network(self, path: str) -> None:
        for _, line in self.recording.value_reads:
            raise refusal(
                line,
                f"the step reads a value that the network computed, and calls {named(path)} after it",
                "move this decision into a module's forward",
            )
        for name, line in self.recording.gradient_hooks:
            raise refusal(
                line,
                f"the step calls `{name}` on a tensor, and {named(path)} after it, whose gradient is on other ranks",
                "do it in a module's forward, or let the step run as a whole (strategy.step=whole)",
            )

    # --- functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self._paused:
            return func(*args, **kwargs)
        if name in _READS and self.values.is_unknown(args[0]):
            return self._read(name, args[0])
        if name in _READS:
            self._note_known_read(self.refs(args))
        if name in _GRADIENT_HOOKS:
            self._note_gradient_hook(name)
        return self.record(func, target_of(func, name), args, kwargs, functools.partial(func, *args, **kwargs))

    def apply(self, cls: type, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a custom autograd function as one call, whatever it does inside."""
        run = functools.partial(plain, *args, **kwargs)
        return run() if self._paused else self.record(FunctionApply(cls), target_of_apply(cls), args, kwargs, run)

    def record(
        self,
        function: Callable[..., Any],
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
        held: tuple[str, ...] = (),
    ) -> Any:
        """Run a call and record it. `held`: parameters and buffers that it uses besides its arguments."""
        call = self._begin(function, target, args, kwargs)
        call.held = held
        leaves = pytree.tree_leaves((args, kwargs))
        if self.scope != -1 and any(map(is_watched, leaves)):
            raise read_items(call.line, f"`{target}`")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        versions = [version(tensor) for tensor in tensors]
        outer, self.current, paused, self._paused = self.current, call, self._paused, True
        try:
            result = run()
        finally:
            self.current, self._paused = outer, paused
        changed = [t for t, before in zip(tensors, versions, strict=True) if version(t) != before]
        flagged = [args[0]] if target.endswith("requires_grad.__set__") else []
        if target.endswith("__set__") and isinstance(args[0], torch.Tensor) and not flagged:
            changed.append(args[0])
        self._finish(call, result, changed, flagged)
        return result

    def _begin(
        self, function: Callable[..., Any], target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Recorded:
        self._take((args, kwargs))
        return Recorded(
            index=len(self.recording.calls),
            function=function,
            target=target,
            args=self.refs(args),
            kwargs=self.refs(kwargs),
            scope=self.scope,
            line=user_line(),
            context=current_context(),
            checkpoint=self._regions[-1] if self._regions else None,
        )

    def _finish(
        self, call: Recorded, result: Any, changed: list[torch.Tensor], flagged: Sequence[torch.Tensor] = ()
    ) -> None:
        """Note the result and effects of a call. `flagged`: tensors that changed without their memory."""
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        aliases = [*self._aliases(changed, outputs), *(t for t in flagged if id(t) in self._values)]
        changed = [*changed, *flagged]
        states = [self.state_storages[storage_id(t)] for t in changed if storage_id(t) in self.state_storages]
        num_modules = len(self.recording.modules)
        self.recording.state_changes += [ChangeInPlace(name, call.scope, call.line, num_modules) for name in states]
        if not outputs and not changed and not differentiates(call):
            return
        call.mutated = [self._values[id(alias)] for alias in aliases]
        changed_refs = [self._values[id(tensor)] for tensor in changed if id(tensor) in self._values]
        call.overwritten = list(dict.fromkeys([*call.mutated, *changed_refs]))
        call.num_returned = len(outputs)
        self.recording.calls.append(call)
        self.network.append(call.scope != -1 or any(self.network[ref.call] for ref in call.refs()))
        for number, tensor in enumerate([*outputs, *aliases]):
            self._add_output(call, number, tensor)
            if not self.network[-1]:
                self.sources.setdefault(storage_id(tensor), []).append(tensor)
        call.result = self.refs(result)

    def _aliases(self, changed: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Known values that share memory with a changed tensor and are not among the outputs."""
        storages = {storage_id(tensor) for tensor in changed}
        returned = {id(tensor) for tensor in outputs}
        return [t for storage in storages for t in self._storages.get(storage, ()) if id(t) not in returned]

    def _add_output(self, call: Recorded, number: int, tensor: torch.Tensor) -> None:
        call.outputs.append((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad))
        if id(tensor) in self._states:
            return
        if id(tensor) not in self._values:
            self._alive.append(tensor)
            self._storages.setdefault(storage_id(tensor), []).append(tensor)
        self._values[id(tensor)] = Ref(call.index, number)

    def batch_tensor(self, tensor: torch.Tensor, uniform: int | None = None) -> None:
        """Take a tensor for an input. `uniform`: its number among the leaves of the batch, if its values are known."""
        call = self._begin(_no_function, BATCH, (), {})
        self._finish(call, tensor, [])
        if uniform is not None:
            self.values.add(tensor)
            self.recording.uniform[call.index] = uniform

    def refuse_read_items(self) -> None:
        """Refuse that a forward reads items of samples that are no tensors; the step may."""
        if self.scope != -1:
            modules = self.recording.called(self.scope)
            raise read_items(user_line(), f"the forward of {named(modules[0])}", modules)

    def hide(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuse that others read these tensors, which a recorded call has computed and not returned."""
        for tensor in tensors:
            self.keep(tensor)
            self._hidden.add(id(tensor))

    def _check_hidden(self, tree: Any) -> None:
        if self._hidden and any(id(leaf) in self._hidden for leaf in pytree.tree_leaves(tree)):
            raise escaped(user_line(), self.recording.called(self.scope))

    def _take(self, tree: Any) -> None:
        """Take tensors that the step has from elsewhere, such as an attribute, for inputs like those of the batch."""
        self._check_hidden(tree)
        if self.scope == -1:
            for leaf in pytree.tree_leaves(tree):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and self.refs(leaf) is leaf:
                    self._refuse_trained(leaf)
                    self.batch_tensor(leaf)

    def _refuse_trained(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            raise refusal(
                user_line(),
                "the step computes with a tensor that needs a gradient, but is no parameter of the module (is it in a "
                "module that is kept in a plain list or dict?)",
                "keep modules in nn.ModuleList or nn.ModuleDict, and parameters in nn.Parameter attributes",
            )

    # --- values

    def refs(self, tree: Any) -> Any:
        """The tree with references instead of known tensors and modules."""
        return pytree.tree_map(self._ref, tree)

    def _ref(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in self._states:
                return StateRef(self._states[id(leaf)])
            return self._values.get(id(leaf)) or self._same_memory(leaf) or leaf
        if isinstance(leaf, nn.Module) and id(leaf) in self._paths:
            return ModuleRef(self._paths[id(leaf)])
        return leaf

    def _same_memory(self, tensor: torch.Tensor) -> Ref | None:
        """The value that a tensor unknown to torch's functions represents, as `nn.Buffer(tensor)` makes them."""
        if tensor.layout is not torch.strided:
            return None
        form = tensor.shape, tensor.dtype, tensor.storage_offset()
        for known in reversed(self._storages.get(storage_id(tensor), ())):
            if (known.shape, known.dtype, known.storage_offset()) == form and known.stride() == tensor.stride():
                return self._values[id(known)]
        return None

    def use(self, tree: Any) -> None:
        """Note values that the step uses outside calls of torch: it logs or returns them."""
        self._check_hidden(tree)
        self.uses.extend(leaf for leaf in pytree.tree_leaves(self.refs(tree)) if isinstance(leaf, Ref))

    def use_kept(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note values of the network that the step has put into buffers and attributes of these modules."""
        answers = {ref for call in self.recording.network_calls() for ref in pytree.tree_leaves(call.result)}
        for module in modules:
            own = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
            kept = [value for value in own.values() if isinstance(value, torch.Tensor | list | tuple | dict)]
            refs = pytree.tree_leaves(self.refs([kept, buffers_of(module)]))
            found = [ref for ref in refs if isinstance(ref, Ref) and self.network[ref.call]]
            self.uses.extend(ref for ref in found if ref in answers or self.recording.calls[ref.call].scope == -1)

    def _read(self, name: str, tensor: torch.Tensor) -> Any:
        line = user_line()
        if self.scope != -1:
            raise refusal(
                line,
                f"`{name.strip('_')}` reads the value of a tensor inside a module, so what follows depends on the data",
                "compute without reading the value (torch.where, masks, fixed sizes)",
            )
        self.use(tensor)
        ref = self._values.get(id(tensor))
        if ref is not None and self.network[ref.call]:
            self.recording.value_reads.append((len(self.recording.modules), line))
        value = _plausible(name, tensor, self._number)
        return self._truth(line) if isinstance(value, bool) else value

    def _note_known_read(self, read: Any) -> None:
        """Note from which uniform tensors of the batch the values come that are being read."""
        leaves = self._uniform_behind(read)
        self.recording.decisions += [(leaf, self.scope, len(self.recording.modules)) for leaf in leaves]

    def _note_read_by_call(self) -> None:
        if self.current is not None:
            self._note_known_read((self.current.args, self.current.kwargs))

    def _uniform_behind(self, read: Any) -> set[int]:
        """The uniform tensors of the batch that values depend on, as numbers of leaves."""
        recording = self.recording
        wanted = {ref.call for ref in pytree.tree_leaves(read) if isinstance(ref, Ref)} if recording.uniform else set()
        for call in reversed(recording.calls) if wanted else ():
            if call.index in wanted:
                wanted.update(ref.call for ref in call.refs())
        return {leaf for index, leaf in recording.uniform.items() if index in wanted}

    def _note_gradient_hook(self, name: str) -> None:
        """Note that the gradient of a value is asked for, which is another tensor's where stages compute the value."""
        line, modules = user_line(), self.recording.called(self.scope)
        if modules:
            raise refusal(
                line,
                f"`{name}` acts on a tensor of the forward itself",
                "do it in a submodule, which is then never cut",
                modules,
            )
        self.recording.gradient_hooks.append((name, line))

    def _truth(self, line: str) -> bool:
        """The next truth value that the step reads: true, unless that was refuted."""
        self.recording.truths.append((len(self.recording.calls), line))
        return len(self.recording.truths) - 1 not in self._refuted

    def refutable(self) -> int | None:
        """The number of the truth value that was read last, if it is true and nothing was computed since."""
        number = len(self.recording.truths) - 1
        if number < 0 or number in self._refuted or self.recording.truths[number][0] != len(self.recording.calls):
            return None
        return number

    def call_that_made(self, tensor: torch.Tensor) -> Recorded | None:
        """The recorded call that made a tensor; None for one that no call made."""
        ref = self._values.get(id(tensor))
        return None if ref is None else self.recording.calls[ref.call]

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor alive, so that no other tensor gets its id or memory."""
        self._alive.append(tensor)

    # --- regions

    def enter_region(self) -> None:
        self._regions.append(self._num_regions)
        self._num_regions += 1

    def leave_region(self) -> None:
        self._regions.pop()


def _positions() -> tuple[int, int]:
    """The positions of Python's and NumPy's streams of random numbers, which every draw moves."""
    return random.getstate()[1][-1], np.random.get_state()[2]  # type: ignore[index]


def _has_state(module: nn.Module) -> bool:
    if isinstance(module, torchmetrics.Metric | torchmetrics.MetricCollection):
        return False
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _no_function() -> None:
    """The function of recorded calls that represent tensors of the batch."""


def target_of(func: Callable[..., Any], name: str) -> str:
    if name in ("__get__", "__set__"):
        return f"Tensor.{getattr(func.__self__, '__name__', '')}.{name}"  # type: ignore[attr-defined]
    return name


def target_of_apply(cls: type) -> str:
    """The target of a call of a custom autograd function."""
    return f"{cls.__name__}.apply"


def _plausible(name: str, tensor: torch.Tensor, number: int) -> Any:
    """A value with which the step can continue; no captured value may depend on it."""
    ones = np.full(tuple(tensor.shape), float(number))
    if name in ("tolist", "numpy", "__array__"):
        return ones.tolist() if name == "tolist" else ones
    kind = {"__bool__": bool, "is_nonzero": bool, "__int__": int, "__index__": int, "__float__": float}.get(name)
    if kind is None:
        kind = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
    return kind(number)


def register_dataclasses(output: Any) -> None:
    """Register dataclasses that a module returns with pytree."""
    import dataclasses

    for leaf in pytree.tree_leaves(output):
        kind = type(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(kind)
