"""Refuses steps that are compiled together with what is to be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_gpp._compat.torch import uncompiled


def compiled_steps(module: nn.Module, steps: Sequence[str]) -> Iterator[str]:
    """Refusals of steps that are compiled together with the network that is to be cut."""
    for step in steps:
        function = getattr(module, step, None)
        if uncompiled(function) is not function:
            yield (
                f"{type(module).__name__}.{step} is compiled (torch.compile) with the network inside, which is to be "
                "cut into stages. Compile modules that it calls and that stages call undivided, for example "
                "self.encoder.compile()."
            )
