"""The step of a captured network at run time: up to its network calls, for their inputs, or entirely."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torchmetrics import Metric

from lightning_gpp._compat.torch import pytree, version
from lightning_gpp.capture.kept import kept_by, without_effects
from lightning_gpp.capture.network import InputKey, Network
from lightning_gpp.capture.recording import Event, ModuleCall, Recorded, Ref, StateRef
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import CaptureError, ShapeError
from lightning_gpp.graph import TensorSpec
from lightning_gpp.runtime.named_tensors import tensor_named
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.stages.code import variable
from lightning_gpp.stages.holes import Holes
from lightning_gpp.stages.step import Answers, StepRunner
from lightning_gpp.wording import named

_WHOLE: Final = "let the step run as a whole (strategy.step=whole), in which calls may differ from step to step"
_STEADY: Final = "pass values that change as tensors, in every step (a mask that hides nothing instead of None)"


class Stopped(BaseException):
    """Ends the step after its last network call; not an Exception, so that user code does not catch it."""


@dataclass(kw_only=True)
class UserStep(StepRunner):
    """The step of a captured network."""

    network: Network
    specs: list[list[TensorSpec]]
    input_keys: dict[str, InputKey]
    input_specs: dict[str, TensorSpec]
    opened: Collection[str] = ()
    """Paths of modules whose forwards count as parts of the step, see `Capture.opened`."""

    def __post_init__(self) -> None:
        self._calls = self.network.network_calls()
        self._modules = {call.path: self.module.get_submodule(call.path) for call in self._calls}
        self._paths = {id(module): path for path, module in self._modules.items()}
        self._answers, self._called = Answers(self._modules.values()), 0
        self._mixes = len(self._calls) > 1
        changed = {note.subject for note in self.network.recording.early(Event.CHANGES_STATE)}
        self._changed = [tensor_named(self.module, name) for name in changed]
        self._glue = {call.step_number: call for call in self.network.calls if call.scope == -1}
        self._of_step = self._modules_of_step()
        self._inside = kept_by(())
        self._reads_states = any(call.states() for call in self._glue.values())
        self.results = {id(call): pytree.tree_flatten(call.result) for call in self._calls}
        known: list[ModuleCall | Recorded] = [*self._calls, *self._glue.values()]
        self.arguments = {id(call): pytree.tree_leaves((call.args, call.kwargs)) for call in known}
        self._slots: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for name, (kind, number, leaf) in self.input_keys.items():
            self._slots.setdefault((kind, number), []).append((name, leaf))
        leaves = (leaf for call in self._calls for leaf in pytree.tree_leaves(call.result))
        self._names = {leaf: variable(leaf) for leaf in leaves if isinstance(leaf, Ref)}
        self._forms: dict[int, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        self._first: dict[tuple[int, int], dict[str, tuple[torch.Tensor, int]]] | None = None
        """Inputs of the micro-batches of the first mini-batch, with their versions."""
        self._is_new = True

    def _modules_of_step(self) -> list[nn.Module]:
        """The modules whose attributes the step may set: those whose forwards are its own, and those that it touches.

        Metrics are left out, whose states change in place, and torch's own classes, whose forwards keep nothing.
        """
        inside = tuple(f"{path}." if path else "" for path in self._modules)

        def counts(path: str, part: nn.Module) -> bool:
            own = not (f"{path}.".startswith(inside) or type(part).__module__.partition(".")[0] == "torch")
            return (own or path in self.network.recording.touched) and not isinstance(part, Metric)

        return [self.module, *(part for path, part in self.module.named_modules() if path and counts(path, part))]

    def resized(
        self,
        specs: list[list[TensorSpec]],
        input_specs: dict[str, TensorSpec],
        arguments: dict[int, list[Any]],
        results: dict[int, tuple[list[Any], Any]],
    ) -> UserStep:
        """The same step for mini-batches of other sizes, see `stages/sizes.py`."""
        other = copy(self)
        other.specs, other.input_specs, other.arguments, other.results = specs, input_specs, arguments, results
        other._open, other._forms, other._lists = {}, {}, {}
        other._users_streams, other._first = ExitStack(), None
        return other

    def _note_batch(self) -> None:
        self._inside = kept_by(self._of_step)
        self._first, self._is_new = ({} if self._is_new else None), False

    # --- source

    def inputs(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Run the step up to its last network call, and return the arguments of its network calls by slot name.

        Raises:
            CaptureError: the step calls its modules differently than when it was captured.
        """
        found: dict[str, torch.Tensor] = {}
        holes = self._holes(micro_batch)

        def answer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number, call = self._next(module)
            self._take(found, call, number, args, kwargs)
            if number == len(self._calls) - 1:
                raise Stopped
            return self._result(call, lambda ref: self._hole(ref, micro_batch.num_samples, holes))

        self._called = 0
        key = micro_batch.lane, micro_batch.index
        with (
            without_effects(self._of_step, self._changed, self._inside),
            self._answers.given(answer),
            torch.set_grad_enabled(self.returns_loss),
        ):
            try:
                with holes or nullcontext():
                    self.call(micro_batch, copied=self.changes_batch)
                ended = True
            except Stopped:
                ended = False
        if ended:
            raise self._not_called(self._calls[-1])
        if holes is not None:
            self._take_mixed(found, holes)
        if self._first is not None:
            self._first[key] = {name: (tensor, version(tensor)) for name, tensor in found.items()}
        return self._checked(found, micro_batch)

    def _not_called(self, call: ModuleCall) -> CaptureError:
        present = dict(self.module.named_modules(remove_duplicate=False))
        replaced = [path for path, module in self._modules.items() if present.get(path) is not module]
        if replaced:
            return refusal(
                call.line,
                f"{named(replaced[0])} is another module than when the step was captured",
                "replace it before training (in configure_model)",
            )
        return self._other(
            call,
            f"the step returned before it called {named(call.path)} for this mini-batch",
            "call it for each mini-batch, and return a zero loss where one does not count (0 * loss)",
        )

    def _other(self, call: ModuleCall | Recorded, reason: str, remedy: str = "") -> CaptureError:
        """The error of a step that does something else than when it was captured.

        The step as a whole helps, except where a module's forward decides by values that it reads.
        """
        return refusal(call.line, reason, remedy or (_STEADY if self.opened else _WHOLE))

    def _next(self, module: nn.Module) -> tuple[int, ModuleCall]:
        """The number of a call of the step, and what it was when the step was captured."""
        path, number = self._paths[id(module)], self._called
        self._called += 1
        if number >= len(self._calls) or self._calls[number].path != path:
            wanted = self._calls[number].path if number < len(self._calls) else "nothing"
            raise self._other(
                self._calls[min(number, len(self._calls) - 1)],
                f"the step calls {named(path)} where it called {wanted!r} when it was captured",
                "let the step call the same modules in the same order for every batch",
            )
        return number, self._calls[number]

    def _take(
        self,
        found: dict[str, torch.Tensor],
        call: ModuleCall,
        number: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=self._is_list if self._lists else None)
        self._compare(self.arguments[id(call)], leaves, call)
        for name, leaf in self._slots.get(("call", number), ()):
            found[name] = leaves[leaf].detach()

    def _compare(self, captured: list[Any], leaves: list[Any], call: ModuleCall | Recorded) -> None:
        """Check that captured Python values are the same now, so that none is frozen silently."""
        if len(captured) != len(leaves):
            reason = f"the call has {len(leaves)} values in its arguments, and had {len(captured)} when it was captured"
            raise self._other(call, reason)
        for before, now in zip(captured, leaves, strict=True):
            if _is_tensor(before) != isinstance(now, torch.Tensor) or (is_frozen(before) and before != now):
                reason = f"an argument was {_told(before)} when the step was captured and is {_told(now)} now"
                raise self._other(call, reason)

    def _take_mixed(self, found: dict[str, torch.Tensor], holes: Holes) -> None:
        if holes.targets != self.network.step_targets:
            raise self._other(
                self._calls[-1],
                f"between its module calls the step called {self.network.step_targets} when it was captured, and "
                f"{holes.targets} now",
                "let the step compute the same for every batch; let a flag that decides change before the mini-batch "
                "is fetched (in on_train_batch_end, not in on_train_batch_start); or decide inside a module's forward",
            )
        for number, call in self._glue.items():
            leaves = holes.calls[number]
            self._compare(self.arguments[id(call)], leaves, call)
            for name, leaf in self._slots.get(("glue", number), ()):
                found[name] = leaves[leaf].detach()

    def _checked(self, inputs: dict[str, torch.Tensor], micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        number = micro_batch.num_samples
        if number not in self._forms:
            specs = self.input_specs.items()
            self._forms[number] = {name: (spec.sizes(number), getattr(torch, spec.dtype)) for name, spec in specs}
        for name, tensor in inputs.items():
            if (tensor.shape, tensor.dtype) != self._forms[number][name]:
                raise self._misshapen(name, tensor, number)
        return inputs

    def _misshapen(self, name: str, tensor: torch.Tensor, num_samples: int) -> ShapeError:
        spec, (kind, number, leaf) = self.input_specs[name], self.input_keys[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return ShapeError(
            f"Input {leaf} of {kind} {number} ({named(self._calls[number].path)}) has shape "
            f"{tuple(tensor.shape)} ({dtype}) for {num_samples} samples; the captured batch had "
            f"{tuple(map(str, spec.shape))} ({spec.dtype}) for b samples, in a mini-batch of the same form. "
            f"{'Change shapes in the data, where it is noticed' if self.opened else _WHOLE.capitalize()}."
        )

    # --- step

    def spec_of(self, ref: Ref) -> TensorSpec:
        """The shape and dtype of a value of the network."""
        return self.input_specs[variable(ref)] if ref.call < 0 else self.specs[ref.call][ref.output]

    def run(self, micro_batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the step with the results of its network calls from `values`. Returns `{LOSS: loss}` in training.

        Values that the captured step only passed on to network calls are meta tensors, and so are values computed from
        them; reading them is an error of torch.
        """
        holes = self._holes(micro_batch, with_parameters=self._reads_states)

        def value(ref: Ref) -> torch.Tensor:
            known = values.get(self._names[ref])
            if known is None:
                return self._hole(ref, micro_batch.num_samples, holes)
            return known.clone() if ref in self.network.overwritten else known  # others may read it, or run again on it

        key = micro_batch.lane, micro_batch.index
        first = self._first.pop(key, {}) if self._first else {}

        def answer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number, call = self._next(module)
            self._check_again(first, call, number, pytree.tree_leaves((args, kwargs)) if first else [])
            return self._result(call, value)

        self._called = 0
        with self._answers.given(answer), holes or nullcontext():
            output = self.call(micro_batch)
        return self.finish(micro_batch, output, values.values())

    def _check_again(
        self, first: Mapping[str, tuple[torch.Tensor, int]], call: ModuleCall, number: int, leaves: Sequence[Any]
    ) -> None:
        """Check that the step gives its modules what it gave them when it ran for the inputs of the network."""
        for name, leaf in self._slots.get(("call", number), ()) if first else ():
            tensor, before = first[name]
            if version(tensor) == before and not _is_same(tensor, leaves[leaf]):
                raise refusal(
                    call.line,
                    f"the step runs once for the inputs of its modules and once for its loss, and the second time it "
                    f"gave {named(call.path)} other inputs: they depend on a random generator of yours, or on "
                    "something outside of the module that the step changes (a global variable, a class)",
                    "draw by torch without a generator (torch.rand, which strategy.seed starts), and keep all else "
                    "in attributes of the module",
                )

    @property
    def changes_batch(self) -> bool:
        return self.network.recording.changes_batch

    def _result(self, call: ModuleCall, value: Callable[[Ref], torch.Tensor]) -> Any:
        leaves, structure = self.results[id(call)]
        return pytree.tree_unflatten([value(leaf) if isinstance(leaf, Ref) else leaf for leaf in leaves], structure)

    def _holes(self, micro_batch: MicroBatch, *, with_parameters: bool = False) -> Holes | None:
        """The holes of a run of the step; None if it computes nothing between its network calls."""
        device = self._open[micro_batch.lane].device
        return Holes(device, with_parameters=with_parameters) if self._mixes else None

    def _hole(self, ref: Ref, num_samples: int, holes: Holes | None) -> torch.Tensor:
        spec = self.spec_of(ref)
        hole = torch.empty(spec.sizes(num_samples), dtype=getattr(torch, spec.dtype), device="meta")
        if self.returns_loss and self._learns(ref):
            hole = hole.requires_grad_().clone()  # the step may change it in place, unlike a leaf
        if holes is not None:
            holes.add(hole)
        return hole

    def _learns(self, ref: Ref) -> bool:
        """True if a value needed a gradient when the step was captured."""
        if ref.call < 0:
            return self.network.input_outputs[-1 - ref.call][2]
        return self.network.calls[ref.call].outputs[ref.output][2]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for tensors with the same values, but for rounding; and if one has none, or cannot be compared."""
    if one.is_meta or other.is_meta or one.layout is not torch.strided or one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other.detach(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _is_tensor(captured: Any) -> bool:
    return isinstance(captured, Ref | StateRef | torch.Tensor)


def is_frozen(captured: Any) -> bool:
    """True for a captured argument with which later ones are compared."""
    return captured is None or isinstance(captured, bool | int | float | str)


def _told(value: Any) -> str:
    return "a tensor" if _is_tensor(value) else repr(value)


def slots_of(keys: Sequence[InputKey]) -> dict[str, InputKey]:
    return {f"input{number}": key for number, key in enumerate(keys)}
