"""Causes of losses that differ between undivided samples and micro-batches, with their remedies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from lightning_gpp._compat.torch import BatchNorm, buffers_of
from lightning_gpp.capture.attributes import same_value
from lightning_gpp.wording import some

UNLIKE_ONE_DEVICE: Final = "So training in micro-batches is not training on one device."
OFF: Final = "strategy.self_check=false ends this comparison."

DEPENDENT: Final = (
    "Samples depend on each other or do not count the same (a contrastive loss, a mean over unmasked tokens), "
    "or the batch is cut along a dimension that does not count samples (say which by strategy.batch_dims). "
    "Give the step the undivided mini-batch by strategy.step=whole, or divide the loss by the number of samples."
)

MIXED_DRAWS: Final = (
    "The training step draws random numbers that mix its samples (a permutation, as for mixup), so its loss in "
    "micro-batches was not compared with that of the same samples undivided (strategy.self_check). It draws anew for "
    "each micro-batch, from the samples of that one; strategy.step=whole gives it the undivided mini-batch."
)
WHOLE: Final = "strategy.step=whole"
UNCUT: Final = "strategy.num_micro_batches=1"
"""Options that give the step, or its network calls, undivided mini-batches."""
_SMALL: Final = 1 << 20
"""Elements of a tensor that is looked at for changes."""


def tried(message: str, works: Callable[[], bool]) -> str:
    """The message, which names a step as a whole only if that `works` on this model, otherwise a single micro-batch."""
    return message if WHOLE not in message or works() else message.replace(WHOLE, UNCUT)


def calls_differ(samples: int, size: int) -> str:
    """The warning of network calls whose results depend on the micro-batches in which they are computed."""
    return (
        f"The network calls of the step, which runs as a whole, have other results for {samples} samples at once than "
        f"for micro-batches of {size}: an argument has another number of rows than samples (several images per sample "
        f"in one tensor), or a module combines samples. {UNLIKE_ONE_DEVICE} {UNCUT} leaves network calls undivided. "
        f"{OFF}"
    )


def other_reduction(sums: bool) -> str:
    """The cause of a loss that is a mean where losses are added (`sums`), or a sum where they are averaged."""
    return f"This loss is a {'mean' if sums else 'sum'} over samples: set strategy.loss_reduction."


def kept_state(names: Sequence[str]) -> str:
    """The cause of a loss that differs when the same samples come again. `names`: attributes that changed then."""
    named = f" ({some(names, most=3)})" if names else ""
    of_step = bool(names) and not any("." in name for name in names)
    return (
        f"{'The step' if of_step else 'The forward of a module, or the step,'} keeps state between its calls{named}, "
        "which changes once per micro-batch instead of once per mini-batch; the same samples have another loss the "
        "next time. Undivided mini-batches change it once: set strategy.step=whole for state that the step itself "
        f"changes{'' if of_step else ', and strategy.num_micro_batches=1 for that of modules'}."
    )


def logged_otherwise(names: Sequence[str]) -> str:
    """The warning of logged values that are no means over samples."""
    many = len(names) > 1
    return (
        f"{some(names, most=5)}, which the training step logs, {'are' if many else 'is'} no mean over samples. It runs "
        "once for each micro-batch, so the mean over micro-batches is logged, and not what one device logs. Training "
        "itself is that of one device. Log a metric object (self.log(name, self.metric)), whose state is that of all "
        f"samples, or set strategy.step=whole. {OFF}"
    )


def small_state(module: nn.Module) -> dict[str, Any]:
    """Copies of buffers and of attributes that are numbers or tensors, by name, except those of BatchNorm."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in {**vars(part), **buffers_of(part)}.items():
            small = isinstance(value, Tensor) and not value.is_meta and value.numel() <= _SMALL
            if (small or isinstance(value, int | float)) and not isinstance(part, BatchNorm):
                found[f"{path}.{name}" if path else name] = value.detach().clone() if small else value
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of values that are not the same."""
    return [name for name, value in after.items() if name in before and not same_value(before[name], value)]
