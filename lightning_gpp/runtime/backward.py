"""Autograd's engine without what `torch.autograd.backward` does before it, which outlasts a small stage.

The one private name of torch in the runtime, which may not import `_compat`: that knows Lightning.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor | GradientEdge] = ()
) -> None:
    """What `torch.autograd.backward` does after its checks.

    The engine checks again, and sums a gradient that it gets for something that was broadcast, as between two nodes.

    Args:
        roots: where it starts.
        gradients: of the roots.
        inputs: what is to get a gradient; by default all that can be reached.
    """
    _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True
    )
