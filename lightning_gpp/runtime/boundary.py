"""Messages between actions and the tensors that they carry; the state that actions of a device share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.graph.operator_graph import DTYPE_BYTES
from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.runtime.stage import Slot

Tensors = Sequence[Tensor | None]
"""The tensors of a message, one for each of its slots. For gradients, None if there is none."""

MessageTensors = list[Tensors | None]
"""The tensors of all messages of a device, by message id; None if they have not arrived, or are no longer needed."""

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPE_BYTES}

TOKEN: Final = Slot("@token", TensorSpec(shape=(Affine(0, 1),), dtype="uint8"))
"""The tensor of an artificial edge, which carries nothing but the order."""


def carried(edge: Edge, slots: Sequence[Slot], gradient: bool) -> tuple[Slot, ...]:
    """The slots of a message."""
    if edge.artificial:
        return (TOKEN,)
    if gradient:
        return tuple(slot for slot in slots if slot.spec.requires_grad)
    return tuple(slots)


def describe_edge(plan: Plan, edge: Edge) -> str:
    source = "the data" if edge.src == SOURCE else f"stage {plan.stages[edge.src].name!r}"
    return f"the edge from {source} to stage {plan.stages[edge.dst].name!r}"


class DeviceState:
    """State that all actions of a device share, for all mini-batches.

    Attributes:
        token: the tensor that artificial edges carry.
        steady: whether the current period is complete; it is not while a continuous pipeline fills or drains.
    """

    def __init__(self, device: torch.device) -> None:
        self.token = torch.zeros(1, dtype=torch.uint8, device=device)
        self.steady = True
