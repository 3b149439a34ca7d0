"""Checks and clips the gradients of an asynchronous pipeline before an optimizer step.

No rank may wait for a rank that is behind it, so a rank clips by an older norm of the full model: that of the last
optimizer step that all ranks have done. Parts of norms are summed in the background.

Ranks add vectors with an entry for each set of stages that share parameters, and only one rank has a term for an entry.
So sums do not depend on the order of the ranks, and one device computes the same to the last bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lightning_gpp.errors import GPPError
from lightning_gpp.training.control import Control
from lightning_gpp.training.tensors.replicas import Layout

_NOTHING: Final = torch.zeros((), dtype=torch.float64)


@dataclass(slots=True)
class _Sum:
    """The squares of the norms of an optimizer step, by group; incomplete while there is `work`."""

    update: int
    squares: Tensor
    work: dist.Work | None = None

    def added(self) -> Tensor:
        """The squares, once all ranks have added theirs."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.squares


UserStages = tuple[int, ...]
"""The stages that use a parameter."""


class StageGradients:
    """The gradients of this rank's stages, and the norms over all stages.

    Args:
        module: the module with the parameters.
        layout: the stages that use them, and the ranks that hold them.
        control: the side channel of this rank.
    """

    def __init__(self, module: nn.Module, layout: Layout, control: Control) -> None:
        self._module, self._layout, self._control = module, layout, control
        self._sums: deque[_Sum] = deque()

    def check(self, step: int) -> None:
        """Raise GPPError if a gradient is not finite, with its stage and parameter."""
        gradients = {name: p.grad for name, p in self._parameters().items() if p.grad is not None}
        if bool(get_total_norm(gradients.values()).isfinite()):
            return
        for name, gradient in gradients.items():
            if not bool(gradient.isfinite().all()):
                raise GPPError(
                    f"The gradient of {name!r} in {self._stages(name)} is not finite after mini-batch {step}. Other "
                    "stages would continue with it for as many mini-batches as they are apart, so training ends here. "
                    "Lower the learning rate, clip gradients (trainer.gradient_clip_val), or continue regardless with "
                    "strategy.on_nonfinite=ignore."
                )

    def scale(self, stepped: Iterable[Tensor], max_norm: float, update: int, age: int) -> Tensor:
        """Scale gradients so that their norm is at most `max_norm`; returns the model's norm, as far as known.

        Args:
            stepped: the parameters whose gradients are scaled.
            max_norm: the largest norm.
            update: number of the optimizer step.
            age: number of optimizer steps by which the model's norm is older; 0 waits for all ranks.
        """
        norm = self._norm(update, age)
        clip_grads_with_norm_(stepped, max_norm, norm)
        return norm

    def state(self) -> dict[int, list[float]]:
        """The norms that later steps may be clipped by, by number of the optimizer step. All ranks call this."""
        return {known.update: known.added().tolist() for known in self._sums}

    def load(self, state: Mapping[int, list[float]]) -> None:
        """Load the state of an earlier run."""
        self._sums = deque(
            _Sum(update, torch.tensor(squares, dtype=torch.float64)) for update, squares in state.items()
        )

    def _norm(self, update: int, age: int) -> Tensor:
        """The norm of `age` steps ago; in the first steps of a run, which have none, the current one."""
        if not self._sums or self._sums[-1].update != update:
            self._sums.append(self._started(update))
        while self._sums[0].update < update - age:
            self._sums.popleft()
        known = self._sums[0] if self._sums[0].update == update - age else self._sums[-1]
        return known.added().sum().sqrt()

    def _started(self, update: int) -> _Sum:
        """The sum of this step, to which all ranks add their parts."""
        mine, groups = self._squares(), sorted(set(self._layout.uses.values()))
        nothing = _NOTHING.to(next((square.device for square in mine.values()), _NOTHING.device))
        squares = torch.stack([mine.get(group, nothing) for group in groups]).cpu()  # one wait for the device
        return _Sum(update, squares, self._control.sum_later(squares))

    # -- groups -------------------------------------------------------------------------------------------------------

    def _squares(self) -> dict[UserStages, Tensor]:
        """The squared norm of every group with gradients, of the parameters that no earlier device has."""
        squares = {}
        for group, parameters in self._by_group().items():
            norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
            if norms:
                squares[group] = torch.stack(norms).pow(2).sum()
        return squares

    def _by_group(self) -> dict[UserStages, list[nn.Parameter]]:
        groups: dict[UserStages, list[nn.Parameter]] = {}
        for name, parameter in self._parameters().items():
            if min(self._layout.placement.devices[name]) == self._control.device:
                groups.setdefault(self._layout.uses[name], []).append(parameter)
        return groups

    def _parameters(self) -> dict[str, nn.Parameter]:
        here = self._layout.placement.names_on(self._control.device)
        return {name: parameter for name, parameter in self._module.named_parameters() if name in here}

    def _stages(self, name: str) -> str:
        stages = [repr(self._layout.plan.stages[stage].name) for stage in self._layout.uses[name]]
        return f"stage {' and '.join(stages)}" if stages else "no stage"
