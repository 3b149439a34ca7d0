"""Products: the nodes of an autograd graph whose gradients of parameters can wait, and their later computation.

They are computed from the node's saved tensors (see "Saved tensors" in torch's notes on autograd), by the same kernels
on the same operands as in the node itself (torch's `derivatives.yaml`), so that they are equal bit for bit. This takes
one operand and the arriving gradient; the rest of the graph can be freed.

The following are not in the list, and so are computed with the gradients of the inputs: fused nodes (an
`autograd.Function`, a compiled region, a recurrent cell), which compute all their gradients at once, and norms,
separate scales and biases, whose gradients cost little and would keep their operands alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_gpp._compat.torch import saved, saved_unread, version
from lightning_gpp.runtime.offload import SavedTensor, changed_in_place

Formula = Callable[["Operand", Tensor], Tensor]
"""A function from an operand and the gradient of the product to the gradient of the other operand."""


class Operand:
    """A tensor that a product saved. `layout`: whether the other operand is stored column by column."""

    __slots__ = ("by_columns", "tensor", "version")

    def __init__(self, tensor: Tensor, by_columns: bool = False) -> None:
        self.tensor = tensor.detach()  # without the graph
        self.version, self.by_columns = version(tensor), by_columns

    def get(self) -> Tensor:
        """The tensor. Raises GPPError if it was changed in place since then, like autograd."""
        if version(self.tensor) != self.version:
            until = "the weight gradients are computed"
            raise changed_in_place(self.tensor.shape, version(self.tensor), self.version, until)
        return self.tensor


def _first_of_mm(second: Operand, gradient: Tensor) -> Tensor:
    if second.by_columns:
        return second.get().conj().mm(gradient.t()).t()
    return gradient.mm(second.get().mH)


def _second_of_mm(first: Operand, gradient: Tensor) -> Tensor:
    if first.by_columns:
        return gradient.t().mm(first.get().conj()).t()
    return first.get().mH.mm(gradient)


def _first_of_bmm(second: Operand, gradient: Tensor) -> Tensor:
    return gradient.bmm(second.get().mH)


def _second_of_bmm(first: Operand, gradient: Tensor) -> Tensor:
    return first.get().mH.bmm(gradient)


class Matrices:
    """Products of two matrices, or of two batches of them, with an optional summand.

    Args:
        first, second: the node's names of the operands.
        offset: index of the first operand's gradient; a summand's comes before it.
        formulas: formulas of the gradients of the first and of the second operand.
    """

    def __init__(self, first: str, second: str, *, offset: int, formulas: tuple[Formula, Formula]) -> None:
        self.operands = (first, second)
        self._offset, self._formulas = offset, formulas

    def fits(self, node: Any) -> bool:
        return not self._offset or (saved(node, "alpha") == 1 and saved(node, "beta") == 1)

    def later(self, node: Any, wanted: Sequence[int]) -> Callable[[Tensor], list[Tensor]]:
        """A function that computes the wanted gradients from the arriving one, without keeping the node.

        The gradient of a summand is the arriving one, which autograd sums if the summand was broadcast.
        """
        offset, formulas = self._offset, self._formulas
        parts = [(formulas[i - offset], self._other(node, i - offset)) if i >= offset else None for i in wanted]

        def gradients(gradient: Tensor) -> list[Tensor]:
            return [part[0](part[1], gradient) if part else gradient for part in parts]

        return gradients

    def _other(self, node: Any, which: int) -> Operand:
        """The operand from which the gradient of this one is computed."""
        return Operand(saved(node, self.operands[1 - which]), _is_by_columns(node, self.operands[which]))


def _is_by_columns(node: Any, name: str) -> bool:
    """True for an operand that is a transposed matrix; nodes do not save the sizes of batches of matrices."""
    try:
        sizes, strides = saved(node, f"{name}_sym_sizes"), saved(node, f"{name}_sym_strides")
    except AttributeError:
        return False
    return bool(sizes and strides[0] == 1 and strides[1] == sizes[0])


class Convolution:
    """Convolutions of all kinds."""

    operands = ("input", "weight")
    settings = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")

    def fits(self, node: Any) -> bool:
        return True

    def later(self, node: Any, wanted: Sequence[int]) -> Callable[[Tensor], list[Tensor]]:
        image, weight = Operand(saved(node, "input")), Operand(saved(node, "weight"))
        rest = [*(saved(node, name) for name in self.settings), [i in wanted for i in range(3)]]

        def gradients(gradient: Tensor) -> list[Tensor]:
            every = torch.ops.aten.convolution_backward(gradient, image.get(), weight.get(), *rest)
            return [every[i] for i in wanted]

        return gradients


_MM: Final = (_first_of_mm, _second_of_mm)
_BMM: Final = (_first_of_bmm, _second_of_bmm)

PRODUCTS: Final[Mapping[str, Matrices | Convolution]] = {
    "AddmmBackward0": Matrices("mat1", "mat2", offset=1, formulas=_MM),
    "MmBackward0": Matrices("self", "mat2", offset=0, formulas=_MM),
    "BaddbmmBackward0": Matrices("batch1", "batch2", offset=1, formulas=_BMM),
    "BmmBackward0": Matrices("self", "mat2", offset=0, formulas=_BMM),
    "ConvolutionBackward0": Convolution(),
}
"""Products by the class of their nodes."""


def is_open(node: Node) -> bool:
    """True if the saved tensors of a product can be read without computing.

    Hooks of an activation checkpoint would compute them, and allow this only once; those of an offload have
    loaded them.
    """
    values = [saved_unread(node, name) for name in PRODUCTS[type(node).__name__].operands]
    return all(value is None or isinstance(value, Tensor | SavedTensor) for value in values)


class Later:
    """The gradients of some of a product's operands, available once the product's own has arrived (as `gradient`).

    Args:
        node: the product; it is not kept.
        wanted: indices of its gradients.

    Attributes:
        edges: the edges along which these continue.
    """

    __slots__ = ("_compute", "edges", "gradient")

    def __init__(self, node: Node, wanted: Sequence[int]) -> None:
        self._compute = PRODUCTS[type(node).__name__].later(node, wanted)
        functions = node.next_functions
        self.edges = [GradientEdge(*functions[i]) for i in wanted]  # type: ignore[arg-type]
        self.gradient: Tensor | None = None

    def compute(self) -> list[Tensor]:
        return [] if self.gradient is None else self._compute(self.gradient)
