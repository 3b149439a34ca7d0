"""The recorder: notes the calls of the user's step as the user wrote them, of torch functions and of modules.

It works on fake tensors, which have shapes and dtypes, but need no memory or compute.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_gpp._compat.torch import ASSERTED, FakeTensor, buffers_of, pytree, version
from lightning_gpp.capture.attributes import OF_EVERY_MODULE
from lightning_gpp.capture.batch import dataclasses_known_to_pytree
from lightning_gpp.capture.items import is_watched
from lightning_gpp.capture.known_values import KnownValues
from lightning_gpp.capture.recording import (
    CallModes,
    Event,
    FunctionApply,
    KnownTensors,
    ModuleCall,
    Recorded,
    Recording,
    Ref,
    differentiates,
    target_of,
    target_of_apply,
)
from lightning_gpp.capture.refusal import (
    Changes,
    escaped,
    filled,
    not_a_parameter,
    read_items,
    refusal,
    refuse_late_network,
)
from lightning_gpp.user_code import user_line
from lightning_gpp.wording import named

BATCH = "batch"
"""The target of recorded calls that represent tensors of the batch."""

_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "is_nonzero"}

_GRADIENT_HOOKS = {"register_hook", "retain_grad"}


class Recorder(TorchFunctionMode):
    """Fills a `Recording`. Install with `watch(module)`, register the batch with `batch_tensor`, then enter it.

    Args:
        num_samples: samples of the batch.
        changes: which forwards count as parts of the step, and which truth values that it reads are false.
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
        changes: Changes,
        number: int = 1,
    ) -> None:
        super().__init__()
        self.opened, self._refuted, self._number = changes.opened, changes.refuted, number
        self.recording = Recording(num_samples, CallModes.current())
        self.values = KnownValues(on_read=self._note_read_by_call)
        self.current: Recorded | None = None
        self.tensors = KnownTensors()
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

    # --- modules

    def watch(self, module: nn.Module) -> None:
        """Record the calls of a module and of those in it."""
        self.tensors.watch(module)
        for path, child in module.named_modules():
            child.register_forward_pre_hook(functools.partial(self._enter, path), with_kwargs=True, prepend=True)
            child.register_forward_hook(functools.partial(self._leave, path), with_kwargs=True)

    @property
    def paused(self) -> bool:
        """True inside of a recorded call, whose own calls are not recorded."""
        return self._paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Record no call inside."""
        paused, self._paused = self._paused, True
        yield
        self._paused = paused

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
            refuse_late_network(self.recording, path)
        self._take((args, kwargs))
        number = len(self.recording.modules)
        call = ModuleCall(
            number=number,
            path=path,
            parent=self.scope,
            args=self.refs(args),
            kwargs=self.refs(kwargs),
            context=CallModes.current(),
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
            dataclasses_known_to_pytree(output)
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
            self.recording.note_decision(self.scope, self.refs(args))
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
            context=CallModes.current(),
            checkpoint=self._regions[-1] if self._regions else None,
        )

    def _finish(
        self, call: Recorded, result: Any, changed: list[torch.Tensor], flagged: Sequence[torch.Tensor] = ()
    ) -> None:
        """Note the result and effects of a call. `flagged`: tensors that changed without their memory."""
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        known = self.tensors
        aliases = [*known.aliases(changed, outputs), *(t for t in flagged if known.value(t) is not None)]
        changed = [*changed, *flagged]
        for name in known.states_in(changed):
            self.recording.note(Event.CHANGES_STATE, name, call.scope, call.line)
        if not outputs and not changed and not differentiates(call):
            return
        call.mutated = known.values(aliases)
        call.overwritten = list(dict.fromkeys([*call.mutated, *known.values(changed)]))
        call.num_returned = len(outputs)
        self.recording.calls.append(call)
        self.network.append(call.scope != -1 or any(self.network[ref.call] for ref in call.refs()))
        for number, tensor in enumerate([*outputs, *aliases]):
            call.outputs.append((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad))
            known.add(tensor, Ref(call.index, number))
        call.result = self.refs(result)

    def batch_tensor(self, tensor: torch.Tensor, uniform: int | None = None) -> None:
        """Take a tensor for an input. `uniform`: its number among the leaves of the batch, if its values are known."""
        call = self._begin(_no_function, BATCH, (), {})
        self._finish(call, tensor, [])
        if (known := self.examples.get(id(tensor))) is not None:
            self.recording.examples[call.index] = known
        if uniform is not None:
            self.values.add(tensor)
            self.recording.uniform[call.index] = uniform

    def refuse_read_items(self) -> None:
        """Refuse that a forward reads items of samples that are no tensors; the step may."""
        if self.scope != -1:
            modules = self.recording.called(self.scope)
            raise read_items(user_line(), f"the forward of {named(modules[0])}", modules)

    def _check_hidden(self, tree: Any) -> None:
        if self.tensors.hides(tree):
            raise escaped(user_line(), self.recording.called(self.scope))

    def _take(self, tree: Any) -> None:
        """Take tensors that the step has from elsewhere, such as an attribute, for inputs like those of the batch."""
        self._check_hidden(tree)
        if self.scope == -1:
            for leaf in pytree.tree_leaves(tree):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and self.refs(leaf) is leaf:
                    if leaf.requires_grad:
                        raise not_a_parameter(user_line())
                    self.batch_tensor(leaf)

    # --- values

    def refs(self, tree: Any) -> Any:
        """The tree with references instead of known tensors and modules."""
        return pytree.tree_map(self.tensors.ref, tree)

    def use(self, tree: Any) -> None:
        """Note values that the step uses outside calls of torch: it logs or returns them."""
        self._check_hidden(tree)
        self.uses.extend(leaf for leaf in pytree.tree_leaves(self.refs(tree)) if isinstance(leaf, Ref))

    def use_kept(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note values of the network that the step has put into buffers and attributes of these modules."""
        answers = self.recording.results()
        for module in modules:
            own = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
            kept = [value for value in own.values() if isinstance(value, torch.Tensor | list | tuple | dict)]
            refs = pytree.tree_leaves(self.refs([kept, buffers_of(module)]))
            found = [ref for ref in refs if isinstance(ref, Ref) and self.network[ref.call]]
            self.uses.extend(ref for ref in found if ref in answers or self.recording.calls[ref.call].scope == -1)

    def _read(self, name: str, tensor: torch.Tensor) -> Any:
        line, made = user_line(), self.call_that_made(tensor)
        if made is not None and made.target.endswith(ASSERTED):
            return True
        if self.scope != -1:
            raise refusal(
                line,
                f"`{name.strip('_')}` reads the value of a tensor inside a module, so what follows depends on the data",
                "compute without reading the value (torch.where, masks, fixed sizes)",
            )
        self.use(tensor)
        ref = self.tensors.value(tensor)
        if ref is not None and self.network[ref.call]:
            self.recording.note(Event.READS_VALUE, name, line=line)
        value = _plausible(name, tensor, self._number)
        return self._truth(line) if isinstance(value, bool) else value

    def _note_read_by_call(self) -> None:
        if self.current is not None:
            self.recording.note_decision(self.scope, (self.current.args, self.current.kwargs))

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
        self.recording.note(Event.HOOKS_GRADIENT, name, line=line)

    def _truth(self, line: str) -> bool:
        """The next truth value that the step reads: true, unless that was refuted."""
        number = len(self.recording.noted(Event.READS_TRUTH))
        self.recording.note(Event.READS_TRUTH, number, line=line)
        return number not in self._refuted

    def refutable(self) -> int | None:
        """The number of the truth value that was read last, if it is true and nothing was computed since."""
        *_, last = None, *self.recording.noted(Event.READS_TRUTH)
        if last is None or last.subject in self._refuted or last.num_calls != len(self.recording.calls):
            return None
        number: int = last.subject
        return number

    def call_that_made(self, tensor: torch.Tensor) -> Recorded | None:
        """The recorded call that made a tensor; None for one that no call made."""
        ref = self.tensors.value(tensor)
        return None if ref is None else self.recording.calls[ref.call]

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
    if not any(True for _ in (*module.parameters(), *module.buffers())):
        return False
    return not isinstance(module, torchmetrics.Metric | torchmetrics.MetricCollection)


def _no_function() -> None:
    """The function of recorded calls that represent tensors of the batch."""


def _plausible(name: str, tensor: torch.Tensor, number: int) -> Any:
    """A value with which the step can continue; no captured value may depend on it."""
    ones = np.full(tuple(tensor.shape), float(number))
    if name in ("tolist", "numpy", "__array__"):
        return ones.tolist() if name == "tolist" else ones
    kind = {"__bool__": bool, "is_nonzero": bool, "__int__": int, "__index__": int, "__float__": float}.get(name)
    if kind is None:
        kind = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
    return kind(number)
