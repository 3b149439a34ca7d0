"""Private names of torch.nn.utils.prune, which keeps what it knows of a pruned parameter in hooks of its module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod, PruningContainer

from lightning_gpp._compat.torch import hook_tables


def pruning_hooks(part: nn.Module) -> dict[str, BasePruningMethod]:
    """The hooks that apply masks in front of a module's forward, by the names of its pruned parameters."""
    hooks = hook_tables(part)[0].values()
    return {hook._tensor_name: hook for hook in hooks if isinstance(hook, BasePruningMethod)}


def remove_hook(part: nn.Module, hook: BasePruningMethod) -> None:
    """Remove a hook in front of a module's forward, as torch does when it prunes a parameter again."""
    table = hook_tables(part)[0]
    for number in [number for number, known in table.items() if known is hook]:
        del table[number]


def without_memory(hook: BasePruningMethod) -> None:
    """Free the tensors that a hook keeps of earlier masks, which torch never reads again."""
    methods = [hook, *(hook if isinstance(hook, PruningContainer) else ())]
    for method in methods:
        kept = {name: value for name, value in vars(method).items() if isinstance(value, Tensor) and not value.is_meta}
        vars(method).update({name: torch.empty_like(value, device="meta") for name, value in kept.items()})
