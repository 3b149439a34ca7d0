"""Runs the forwards and the backwards of a program apart: other work, and other forwards, may come in between.

The program is one that a schedule made and the verifier checked. Its instructions for forwards, in their order, need
none of the others, so they run first; what they keep for the backwards moves out of the executor until these run:

    program     F0 F1 F2 | B0 B1 B2
    a step      forward(z) ...... forward(x) ...... backward(x) ...... forward(y) ...... backward(z)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_gpp.errors import add_note
from lightning_gpp.runtime.compiler import message_of
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.offload import KeptTensors
from lightning_gpp.runtime.recompute import Snapshot
from lightning_gpp.runtime.transport import Transport
from lightning_gpp.schedules.actions import Kind
from lightning_gpp.schedules.program import Instruction, Op, Program

Graphs = tuple[dict[str, Tensor], dict[str, GradientEdge], dict[str, tuple[GradientEdge, Tensor]]]
"""The content of `Saved`."""

_FORWARDS: Final = (Kind.DATA, Kind.FORWARD, Kind.OFFLOAD)
"""Kinds of the actions that run in a forward."""

Recomputed = tuple[dict[str, Tensor], dict[str, int], Snapshot]
"""The inputs of a recomputed forward, their versions, and the state of its modules."""


@dataclass(frozen=True, slots=True)
class KeptForwards:
    """The state that the forwards of a program keep for its backwards, by stage and micro-batch."""

    graphs: dict[tuple[int, int], Graphs]
    recomputed: dict[tuple[int, int], Recomputed]
    offloaded: dict[tuple[int, int], KeptTensors]

    def leaves(self) -> list[Tensor]:
        """The tensors that collect gradients."""
        return [leaf for leaves, _, _ in self.graphs.values() for leaf in leaves.values()]


class PhasedExecutor(Executor):
    """Runs one device's forwards and backwards of a program apart. The program must not split backwards."""

    def __init__(self, program: Program, device: int, *, transport: Transport, **kwargs: Any) -> None:
        super().__init__(program, device, transport=transport, **kwargs)
        self._backward_routes = self._routes_of(transport, 1)
        backward = [self._is_backward(instruction) for instruction in self._instructions]
        self._forwards = [position for position, is_backward in enumerate(backward) if not is_backward]
        self._backwards = [position for position, is_backward in enumerate(backward) if is_backward]
        self._kept_lane = self._lanes[0]

    def _is_backward(self, instruction: Instruction) -> bool:
        if instruction.op is Op.COMPUTE:
            return instruction.action is not None and instruction.action.kind not in _FORWARDS
        return message_of(self.program, instruction).gradient

    def forward(self, step: int) -> KeptForwards:
        """Run the forwards for a mini-batch. `step` numbers their random streams."""
        self._kept_lane.state.begin(1.0, step)
        self._kept_lane.link.transport = self._routes.next()
        self._run_part(self._forwards, training=self.program.training)
        return self._taken()

    def backward(self, kept: KeptForwards, step: int, *, again: bool = False) -> None:
        """Run the backwards of a forward; gradients are added to the parameters' `.grad`.

        Args:
            kept: what the forward returned.
            step: the number that it had.
            again: whether another backward of the same forward follows.
        """
        self._kept_lane.state.begin(1.0, step)
        self._kept_lane.link.transport = self._backward_routes.next()
        self._kept_lane.state.keeps_graphs = again
        for leaf in kept.leaves():
            leaf.grad = None
        self._put(kept)
        self._run_part(self._backwards, training=True)
        self._taken()

    def _run_part(self, positions: list[int], training: bool) -> None:
        self._state.steady = self.is_complete = False
        operations = self._periods[0]
        try:
            with torch.set_grad_enabled(training):
                for self._position in positions:
                    operations[self._position]()
                self._finish_sends()
            self.is_complete = True
        except BaseException as error:
            add_note(error, f"This happened on {self.describe()}.")
            self._drop()
            raise

    def _taken(self) -> KeptForwards:
        lane = self._kept_lane
        if self._compiler.host is not None:
            self._compiler.host.settle()
        graphs = {key: (saved.leaves, saved.outputs, saved.losses) for key, saved in lane.saved.items()}
        inputs = {key: (each.inputs, each.versions, each.snapshot) for key, each in lane.recomputed.items()}
        for kept in (lane.saved, lane.recomputed):
            for entry in kept.values():
                entry.clear()
        return KeptForwards(graphs, inputs, {key: each.take() for key, each in lane.offloaded.items()})

    def _put(self, kept: KeptForwards) -> None:
        for key, (leaves, outputs, losses) in kept.graphs.items():
            saved = self._kept_lane.saved[key]
            saved.leaves, saved.outputs, saved.losses = dict(leaves), dict(outputs), losses
        for key, (inputs, versions, snapshot) in kept.recomputed.items():
            again = self._kept_lane.recomputed[key]
            again.inputs, again.versions, again.snapshot = dict(inputs), dict(versions), snapshot
        for key, tensors in kept.offloaded.items():
            self._kept_lane.offloaded[key].put(tensors)
