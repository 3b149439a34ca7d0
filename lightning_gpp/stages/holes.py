"""Holes: tensors without memory, in place of values of other devices while the step looks for its stages' inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from lightning_gpp._compat.torch import autograd_function_calls, pytree, version
from lightning_gpp.capture.recording import target_of, target_of_apply


class Holes(TorchFunctionMode):
    """Returns meta tensors for calls on values of other devices, and notes the real values they are combined with.

    Args:
        device: the device that they seem to be on.
        with_parameters: whether parameters of other devices are holes, too, where they meet values: the step computes
            again what stages have computed with them, and nothing depends on it.
    """

    def __init__(self, device: torch.device, *, with_parameters: bool = False) -> None:
        super().__init__()
        self.device, self._with_parameters = device, with_parameters
        self.holes: dict[int, torch.Tensor] = {}
        self.calls: list[list[Any]] = []
        self.targets: list[str] = []
        self._inside = False
        self._routes = ExitStack()

    def __enter__(self) -> Holes:
        self._routes.enter_context(autograd_function_calls(self._apply))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._routes.close()

    def add(self, tree: Any) -> Any:
        self.holes.update({id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)})
        return tree

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target = functools.partial(target_of, func, getattr(func, "__name__", str(func)))
        return self._called(func, target, args, kwargs or {})

    def _meets_parameters(self, leaves: list[Any]) -> bool:
        """True for values that are combined with parameters of other devices; what such parameters alone do is done."""
        if not self._with_parameters:
            return False
        return len({leaf.is_meta for leaf in leaves if isinstance(leaf, torch.Tensor)}) == 2

    def _apply(self, cls: type, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A custom autograd function is one call, whatever it does inside."""
        return self._called(plain, functools.partial(target_of_apply, cls), args, kwargs)

    def _called(
        self, func: Callable[..., Any], named: Callable[[], str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if self._inside or not (any(id(leaf) in self.holes for leaf in leaves) or self._meets_parameters(leaves)):
            return func(*args, **kwargs)
        target = named()
        if target == "Tensor.device.__get__":
            return self.device
        self._inside = True
        try:
            on_meta = [_outline(leaf) for leaf in leaves]
            versions = [version(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in on_meta]
            args, kwargs = pytree.tree_unflatten(on_meta, structure)
            result = _MOVES.get(func, func)(*args, **kwargs)
        finally:
            self._inside = False
        changed = [
            leaf
            for leaf, meta, before in zip(leaves, on_meta, versions, strict=True)
            if isinstance(meta, torch.Tensor) and version(meta) != before
        ]
        if changed or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self.calls.append(leaves)
            self.targets.append(target)
            self.add((result, changed))
        return result


_MOVES: Final[dict[Any, Any]] = {torch.Tensor.cpu: torch.Tensor.clone, torch.Tensor.cuda: torch.Tensor.clone}
"""Functions that would need the values of their tensor, and what gives their result without."""


def _outline(leaf: Any) -> Any:
    """An argument without memory: nothing is moved to a device."""
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return _on_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor without memory, also of a parameter that other ranks hold, which is of a class of its own."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.to("meta")
    outline = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return outline.requires_grad_(tensor.requires_grad)
