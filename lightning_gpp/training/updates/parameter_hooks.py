"""Users' hooks on gradients of parameters: `register_hook`, `register_post_accumulate_grad_hook`.

On one process a hook gets the gradient of a mini-batch. In stages autograd would give it the part of each micro-batch,
before parts are summed over ranks. So they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_gpp._compat.torch import with_gradient_hooks
from lightning_gpp.errors import ConfigError
from lightning_gpp.wording import some


def check_no_hooks(module: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Raise ConfigError if parameters of the module have hooks on their gradients; quick, for a look in every step."""
    hooked = set(map(id, with_gradient_hooks(parameters)))
    if not hooked:
        return
    names = [name for name, parameter in module.named_parameters() if id(parameter) in hooked]
    raise ConfigError(
        f"The parameters {some(names, most=3)} have hooks on their gradients (register_hook, "
        "register_post_accumulate_grad_hook), which would get those of micro-batches. Change gradients in the hook "
        "on_before_optimizer_step of the module or of a callback, where they are those of mini-batches, on every rank: "
        "`for p in self.parameters(): p.grad is None or p.grad.clamp_(-1, 1)`."
    )
