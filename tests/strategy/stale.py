"""The reference of asynchronous training: a plain loop whose forwards and backwards use older weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Delays = Mapping[str, Sequence[int]]
"""By the path of a stage's module, the updates by which each micro-batch of a mini-batch is ahead of its backward."""


def trained(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: Iterable[Iterable[Any]],
    loss_of: Callable[[Callable[..., Tensor], Any], Tensor],
    delays: Delays,
    *,
    flush_every: int = 1000,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train under the policy `stash`: the loss of every mini-batch.

    The pipeline is empty at the beginning of an epoch, of every `flush_every` mini-batches, and of a smaller one.
    """
    names = dict(module.named_parameters(remove_duplicate=False))
    history, losses = [_copied(names)], list[float]()
    for batches in epochs:
        first, size = len(losses), None
        for batch in batches:
            now, size = len(losses), size or len(batch[0])
            first = now if len(batch[0]) != size or now % flush_every == 0 else first
            optimizer.zero_grad()
            losses.append(_accumulated(module, names, history, batch, loss_of, delays, first))
            optimizer.step()
            after_step()
            history.append(_copied(names))
    return losses


def _accumulated(
    module: nn.Module,
    names: Mapping[str, nn.Parameter],
    history: Sequence[Mapping[str, Tensor]],
    batch: Any,
    loss_of: Callable[[Callable[..., Tensor], Any], Tensor],
    delays: Delays,
    first: int,
) -> float:
    """The loss of a mini-batch, whose gradients are added to those of the newest weights."""
    count, total, found = len(next(iter(delays.values()))), len(batch[0]), 0.0
    for number, parts in enumerate(zip(*(column.chunk(count) for column in batch), strict=True)):
        versions = {path: history[max(first, len(history) - 1 - ahead[number])] for path, ahead in delays.items()}
        used = {name: versions[name.partition(".")[0]][name].clone().requires_grad_() for name in names}
        call = lambda *given, used=used: functional_call(module, used, given, tie_weights=False)  # noqa: E731
        loss = loss_of(call, parts) * len(parts[0]) / total
        loss.backward()
        found += loss.item()
        for name, parameter in names.items():
            grad = used[name].grad
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    return found


def _copied(names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in names.items()}
