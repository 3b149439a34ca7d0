"""What the forward of a micro-batch saved for its backward, and the part of it that can go before W runs.

Autograd frees what it saved when a backward may not be repeated; I must leave what W reads, so autograd frees nothing.
Here every saved tensor lies in a cell. The first micro-batch shows which cells I reads, in which order, and which ones
W reads; from then on a cell that W does not need is emptied when I has read it, as a full backward would do. As long as
I reads the cells in the known order, it is the same graph over the same cells; from the first difference on nothing
more is emptied.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_gpp.errors import GPPError


class Cell:
    """A saved tensor, until it is emptied. `version` tells whether it was changed in place since."""

    __slots__ = ("number", "tensor", "version")

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.tensor: Tensor | None = tensor
        self.version, self.number = tensor._version, number


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What a backward reads of its cells.

    Attributes:
        num_cells: how many the forward filled.
        order: the cells that I reads, in this order.
        needed: the cells that W reads.
        once: the cells that I reads once, and W does not.
    """

    num_cells: int
    order: list[int]
    needed: frozenset[int]
    once: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        counts = dict.fromkeys(self.order, 0)
        for number in self.order:
            counts[number] += 1
        once = (number for number, count in counts.items() if count == 1 and number not in self.needed)
        object.__setattr__(self, "once", frozenset(once))


class SavedTensors:
    """The saved tensors of one micro-batch."""

    def __init__(self) -> None:
        self._cells: list[Cell] = []
        self._num_cells = 0
        self._known: Reads | None = None
        self._order: list[int] = []
        self._read: list[int] = self._order

    def hooks(self) -> saved_tensors_hooks:
        """The context for the forward."""
        return saved_tensors_hooks(self._pack, self._unpack)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Leave it to autograd to free what it saved."""
        self._cells = []

    def fit(self, known: Reads) -> bool:
        """Whether this forward filled as many cells."""
        return known.num_cells == self._num_cells

    def begin_input(self, known: Reads | None) -> None:
        """I is about to run. `known`: what earlier micro-batches of the same structure read."""
        self._num_cells = len(self._cells)
        if known is not None and self.fit(known):
            self._known = known

    def end_input(self) -> None:
        """I has run: empty all cells that W does not need."""
        known = self._known
        if known is not None and len(self._order) == len(known.order):
            for cell in self._cells:
                if cell.number not in known.needed:
                    cell.tensor = None
        self._known, self._read = None, []
        self.release()

    def reads(self) -> Reads:
        """After W: what was read."""
        return Reads(num_cells=self._num_cells, order=self._order, needed=frozenset(self._read))

    def _pack(self, tensor: Tensor) -> Cell:
        cells = self._cells
        cell = Cell(tensor, len(cells))
        cells.append(cell)
        return cell

    def _unpack(self, cell: Cell) -> Tensor:
        tensor, number = cell.tensor, cell.number
        if tensor is None:
            raise GPPError(_GONE)
        if tensor._version != cell.version:
            raise GPPError(_CHANGED.format(shape=tuple(tensor.shape), now=tensor._version, then=cell.version))
        known, read = self._known, self._read
        if known is not None:
            position = len(read)
            if position >= len(known.order) or known.order[position] != number:
                self._known = None
            elif number in known.once:
                cell.tensor = None
        read.append(number)
        return tensor


_GONE = (
    "The weight gradients of a micro-batch need a tensor that those of earlier micro-batches did not need, and that "
    "was freed with the input gradients: its graph looked the same, and is not. Use a schedule without split backwards."
)
_CHANGED = (
    "One of the variables needed for gradient computation has been modified by an inplace operation: a saved tensor "
    "of shape {shape} is at version {now}; expected version {then} instead. Change a clone() of it."
)
