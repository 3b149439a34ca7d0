"""Recomputation: a forward that keeps only its inputs, and the same forward again for the backward.

A whole stage runs again before its backward (`RecomputedForward`). A block of a stage runs again when the backward
reaches it (`recomputed`): then one block at a time needs memory, but no wait can be filled with it.

The first run of a stage has gradients enabled, too, and its graph is dropped: so code and kernels that depend on the
grad mode do the same both times (and draw the same random numbers), and every output shows whether it needs a gradient.
It takes no more memory than the second run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpp._compat.torch import version
from lightning_gpp.errors import GPPError
from lightning_gpp.runtime.boundary import check_promises, hand_out
from lightning_gpp.runtime.module_state import ModuleState, Snapshot
from lightning_gpp.runtime.operations import ComputeForward
from lightning_gpp.runtime.weights.derived import unnoted


@dataclass(slots=True, kw_only=True, eq=False)
class RecomputedForward(ComputeForward):
    """Run a stage and keep its inputs; `run_again` comes before the backward. It changes the state of `modules`."""

    modules: ModuleState
    inputs: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    snapshot: Snapshot = Snapshot([], [])

    def run(self) -> None:
        self.inputs = self._inputs(self.saved)
        self.versions = {name: version(tensor) for name, tensor in self.inputs.items()}
        self.snapshot = self.modules.snapshot()
        outputs = self.forward(self.inputs, self.micro_batch)
        check_promises(outputs, self.promised, self.owner)
        hand_out(_without_graph(outputs), self.outgoing, self.state.values, self.state.device.token)

    def run_again(self) -> None:
        """Make the graph, with the random numbers, buffers and attributes of the first run, which stay untouched."""
        self._check_inputs()
        with self.modules.restored(self.snapshot):
            outputs = self.forward(self.inputs, self.micro_batch)
        check_promises(outputs, self.promised, f"{self.owner}, recomputed,")
        self.clear()
        if self.saved is not None:
            self._save(self.saved, outputs)

    def clear(self) -> None:
        """Drop every tensor."""
        self.inputs, self.versions, self.snapshot = {}, {}, Snapshot([], [])

    def _check_inputs(self) -> None:
        changed = [name for name, tensor in self.inputs.items() if version(tensor) != self.versions[name]]
        if changed:
            raise GPPError(
                f"{self.owner} cannot be recomputed: its inputs {changed} were changed in place since its forward. "
                "Let the module that changes them work on a clone(), or leave the stage out of strategy.recompute."
            )


def _without_graph(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: output.detach().requires_grad_(output.requires_grad) for name, output in outputs.items()}


def recomputed(block: Callable[..., Any], modules: Iterable[nn.Module]) -> Callable[..., Any]:
    """Calls of a block that keep only their arguments, and run again in the backward.

    The second run has the random numbers of the first, and the buffers and attributes of `modules` (each without its
    submodules), which stay untouched.
    """
    state = ModuleState(modules)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        snapshot = state.snapshot()
        contexts = lambda: (unnoted(), state.restored(snapshot))  # noqa: E731
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run
