"""Finds tensors that an optimizer keeps outside of its state, beside its parameters.

Slow weights in a list, in the order of the parameters: the ranks leave out the parameters of others, and the list then
belongs to other ones. Nothing would tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from lightning_gpp.errors import ConfigError

_DIVIDED: Final = {"param_groups", "state", "defaults"}
_DEPTH: Final = 4


def check_lists(optimizer: Optimizer) -> None:
    """Raise ConfigError if an optimizer, or one inside of it, keeps tensors of the shapes of parameters beside them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known, shapes = set(map(id, parameters)), {parameter.shape for parameter in parameters if parameter.ndim > 0}
    for name, tensor in _tensors(vars(optimizer), _DEPTH):
        if id(tensor) not in known and tensor.shape in shapes:
            raise ConfigError(
                f"configure_optimizers returned {type(optimizer).__name__}, which keeps a tensor of shape "
                f"{tuple(tensor.shape)} in its attribute {name!r}, in the order of its parameters. Every rank has only "
                "the parameters of its stages, so the orders would not fit. Keep such tensors in "
                "optimizer.state[parameter], which is divided with the parameters; or train on one device."
            )


def _tensors(attributes: dict[str, Any], depth: int) -> Iterator[tuple[str, Tensor]]:
    for name, value in attributes.items():
        if name not in _DIVIDED:
            yield from ((name, tensor) for tensor in _inside(value, depth))


def _inside(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif not depth:
        return
    elif isinstance(value, Optimizer):
        yield from (tensor for _, tensor in _tensors(vars(value), depth - 1))
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(item, depth - 1)
