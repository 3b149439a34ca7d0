"""Modules that cannot be recorded: each becomes one operator, which calls the module and is never cut.

What they compute depends on values, which a recording on fake tensors does not have: a mixture of experts sorts tokens,
a packed sequence has lengths, LayerDrop draws. Only the shapes of their results are needed. Where fake tensors do not
tell them, the module runs for real, on the samples of the example batch if it is called with them, otherwise on made-up
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import pytree, without_saved_hooks
from lightning_gpp.capture.attributes import CONTAINERS, OF_EVERY_MODULE, Attribute
from lightning_gpp.capture.batch import dataclasses_known_to_pytree
from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.capture.known_values import for_real, is_present
from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import CaptureError
from lightning_gpp.runtime.named_tensors import with_values
from lightning_gpp.runtime.random import seed_streams, undisturbed


@dataclass(frozen=True)
class UncutCall:
    """The function of a recorded call of a module that is never cut; stages call the module itself."""

    path: str

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"{self.path!r} is never cut, and gets an argument that no stage can make: pass tensors, numbers and text."
        )


def keep_uncut(replica: nn.Module, original: nn.Module, uncut: Mapping[str, str], recorder: Recorder) -> None:
    """Let these modules of a copy with fake parameters be recorded as one call each."""
    for path in uncut:
        part = replica.get_submodule(path)
        call = _Uncut(path, part, original.get_submodule(path), recorder)
        object.__setattr__(part, "forward", call)


class _Uncut:
    """Replaces the forward of a module while the step is recorded."""

    def __init__(self, path: str, part: nn.Module, original: nn.Module, recorder: Recorder) -> None:
        self._path, self._part, self._original, self._recorder = path, part, original, recorder
        self._forward = part.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.paused:
            return self._forward(*args, **kwargs)
        run = lambda: self._result(args, kwargs)  # noqa: E731
        held = self._recorder.tensors.states_of(self._part)
        target, kept = type(self._part).__name__, _kept_tensors(self._part)
        result = self._recorder.record(UncutCall(self._path), target, args, kwargs, run, held=held)
        returned = _ids(result)
        leaves = pytree.tree_leaves(list(_newly_kept(self._part, kept).values()))
        self._recorder.tensors.hide(leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in returned)
        return result

    def _result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with undisturbed():
            with self._recorder.undone_on_error() as failed:
                result = self._forward(*args, **kwargs)
            if failed:
                result = self._real(args, kwargs)
        dataclasses_known_to_pytree(result)
        self._check(result)
        return result

    def _real(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result on made-up values, as fake tensors of its shapes."""
        devices = [leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = devices[0] if devices else torch.device("cpu")
        with for_real():
            seed_streams(0)  # shapes may depend on values, and have to be the same in every capture
            present = device if is_present(device) else torch.device("cpu")
            module = _with_values(self._original, present).train(self._part.training)
            self._recorder.tensors.add_states(module)
            real_args, real_kwargs = pytree.tree_map(lambda leaf: self._value(leaf, present), (args, kwargs))
            kept = _kept_tensors(module)
            result = _run(lambda: module(*real_args, **real_kwargs))
        dataclasses_known_to_pytree(result)
        fakes: dict[int, Any] = {}

        def fake(leaf: Any) -> Any:
            return fakes.setdefault(id(leaf), _fake(leaf, device)) if isinstance(leaf, Tensor) else leaf

        for (path, name), value in _newly_kept(module, kept).items():
            vars(self._part.get_submodule(path))[name] = pytree.tree_map(fake, value)
        return pytree.tree_map(fake, result)

    def _value(self, leaf: Any, device: torch.device) -> Any:
        """Values of an argument: of the example batch if it is a part of it."""
        known = self._recorder.examples.get(id(leaf))
        if known is None or known.is_meta:
            unknown = isinstance(leaf, Tensor) and self._recorder.values.is_unknown(leaf)
            return _made_up(leaf, device) if unknown else leaf
        return known.detach().to(device, copy=True).requires_grad_(known.requires_grad)

    def _check(self, result: Any) -> None:
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, bool | int | float):
                raise refusal(
                    f"the call of {self._path!r}",
                    f"{type(self._part).__name__} cannot be cut and returns the number {leaf!r}, which would be frozen",
                    "return a tensor",
                )


def _run(call: Callable[[], Any]) -> Any:
    """Run a call, and once more without what measures its memory if that is in the way of a function transform."""
    try:
        return call()
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        with without_saved_hooks():
            return call()


def _kept_tensors(module: nn.Module) -> dict[Attribute, Any]:
    """The values of attributes with tensors, of a module and of those in it.

    Such as the loss that a mixture of experts keeps to balance its experts. It is no result: no stage sends it, so
    whoever reads it elsewhere finds what was there before.
    """
    return {
        (path, name): pytree.tree_map(lambda leaf: leaf, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in OF_EVERY_MODULE and isinstance(value, (Tensor, *CONTAINERS)) and _ids(value)
    }


def _newly_kept(module: nn.Module, before: Mapping[Attribute, Any]) -> dict[Attribute, Any]:
    """Those that have other tensors than before."""
    return {key: value for key, value in _kept_tensors(module).items() if not _ids(value) <= _ids(before.get(key))}


def _ids(value: Any) -> set[int]:
    return {id(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}


def _with_values(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on a device; tensors without memory get small random values."""

    def made(_: str, tensor: Tensor) -> Tensor:
        values = 0.02 * torch.randn(tensor.shape) if tensor.is_meta else tensor.detach()
        return with_values(tensor, values.to(device, tensor.dtype, copy=True))

    return private_copy(module, made)


def _made_up(leaf: Tensor, device: torch.device) -> Tensor:
    """Values that most modules accept: normally distributed numbers; ones, which are indices and lengths."""
    if leaf.is_floating_point():
        return torch.randn(leaf.shape).to(device, leaf.dtype).requires_grad_(leaf.requires_grad)
    return torch.ones(leaf.shape, dtype=leaf.dtype, device=device)


def _fake(leaf: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return empty.requires_grad_().clone() if leaf.requires_grad else empty
