"""Checks, scales and clips the gradients of this rank before an optimizer step.

A pipeline that flushes has all gradients then, so ranks look for numbers that are not finite together (`FiniteCheck`).
In one that does not (`StageGradients`) no rank may wait for a rank that is behind it, so a rank clips by an older norm
of the full model: that of the last optimizer step that all ranks have done. Parts of norms are summed in the
background.

Ranks add vectors with an entry for each set of stages that share parameters, and only one rank has a term for an entry.
So sums do not depend on the order of the ranks, and one device computes the same to the last bit.

In half precision all ranks change the scale of the loss together (`LossScale`): each has the gradients of its stages
only, so torch's `GradScaler` alone would skip steps by itself. What it looks for is agreed on by all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_gpp._compat.torch import check_gradients_by, check_gradients_plainly
from lightning_gpp.errors import GPPError
from lightning_gpp.option import refuse_beside
from lightning_gpp.runtime.sharding.shards import local
from lightning_gpp.training.control import Control
from lightning_gpp.training.host import Job
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.options import Options
from lightning_gpp.training.tensors.parameters import Layout

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


_LOSS: Final = "The loss"


class _Held:
    """The parameters that this rank holds.

    Args:
        job: the job of the run.
        layout: the stages that use them, and the ranks that hold them.
    """

    def __init__(self, job: Job, layout: Layout) -> None:
        self._module, self._layout, self._control = job.module, layout, job.control

    def _parameters(self) -> dict[str, nn.Parameter]:
        here = self._layout.names_on(self._control.device)
        return {name: parameter for name, parameter in self._module.named_parameters() if name in here}

    def _not_finite(self, losses: Iterable[Tensor] = ()) -> list[str]:
        """The names of the parameters whose gradients have numbers that are not finite; `_LOSS` for a loss.

        `losses`: whether losses are finite. All is read together, once, unless something is not finite.
        """
        gradients = {name: local(p.grad) for name, p in self._parameters().items() if p.grad is not None}
        norm = get_total_norm(gradients.values()).isfinite()
        *of_losses, of_norm = torch.stack([*(flag.to(norm.device) for flag in losses), norm]).tolist()
        if not all(of_losses):
            return [_LOSS]
        if of_norm:
            return []
        return [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]

    def _described(self, name: str) -> str:
        stages = [repr(self._layout.plan.stages[stage].name) for stage in self._layout.uses.get(name, ())]
        return f"{name!r} in stage {' and '.join(stages)}" if stages else f"{name!r}, which no stage uses,"


class StageGradients(_Held):
    """The gradients of this rank's stages, and the norms over all stages, without a flush. See `_Held`."""

    def __init__(self, job: Job, layout: Layout) -> None:
        super().__init__(job, layout)
        self._sums: deque[_Sum] = deque()

    def check(self, step: int) -> None:
        """Raise GPPError if a gradient is not finite, with its stage and parameter."""
        for name in self._not_finite():
            raise GPPError(
                f"The gradient of {self._described(name)} is not finite after mini-batch {step}. Other "
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
            if min(self._layout.devices[name]) == self._control.device:
                groups.setdefault(self._layout.uses[name], []).append(parameter)
        return groups


_REMEDY: Final = (
    "Lower the learning rate, clip gradients (trainer.gradient_clip_val), leave out such steps with "
    "strategy.on_nonfinite=skip, or continue regardless with strategy.on_nonfinite=ignore."
)


class FiniteCheck(_Held):
    """Lets all ranks stop, or leave out the same optimizer step, if any of them has a number that is not finite.

    Of several the one nearest to the loss is named, because backwards carry it from there to the stages before.

    Args:
        job: the job of the run, whose options say whether to leave out the step or end the run.
        layout: the stages that use them.
        optimizers: the optimizers, whose gradients are dropped for a step that is left out.

    Attributes:
        always: whether ranks look after each mini-batch, not only where the step has skipped micro-batches.
        skips: whether an optimizer step is left out.
    """

    def __init__(self, job: Job, layout: Layout, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(job, layout)
        self._optimizers, self.skips = optimizers, job.options.on_nonfinite == "skip"
        self.always = job.options.on_nonfinite in ("stop", "skip")
        self._losses: list[Tensor] = []

    def note(self, losses: Iterable[Tensor]) -> None:
        """Note the losses of the micro-batches of a mini-batch, on the rank that runs the step."""
        self._losses += [loss.isfinite().all() for loss in losses]

    def before_update(self, step: int, skipped: bool = False) -> None:
        """Look at what was noted, and at the gradients. All ranks call this together.

        Args:
            step: number of the mini-batch.
            skipped: whether the step has skipped micro-batches, of which gradients may not be finite.

        Raises:
            GPPError: on all ranks; a number is not finite, and steps are not left out.
        """
        worst = self._worst()
        self._losses.clear()
        if not self._control.unanimous(worst is not None, everyone=False):
            return
        _, what = max(each for each in self._control.gather_all(worst) if each is not None)
        text = f"{what} is not finite after mini-batch {step}"
        if not self.skips and not skipped:
            raise GPPError(f"{text}. {_REMEDY}")
        why = "training_step returned None" if skipped else "strategy.on_nonfinite=skip"
        self._control.warn(f"{text}, so this optimizer step is left out ({why}).")
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters().values():
            parameter.grad = None

    def _worst(self) -> tuple[int, str] | None:
        """The cause nearest to the loss, and a number that grows towards it; None if everything here is finite."""
        found = self._not_finite(self._losses)
        if found == [_LOSS]:
            return len(self._layout.plan.stages), _LOSS
        last_stage = {name: max(self._layout.uses.get(name, ()), default=-1) for name in found}
        name = max(last_stage, key=last_stage.__getitem__, default=None)
        return None if name is None else (last_stage[name], f"The gradient of {self._described(name)}")


class LossScale:
    """The scale of a run. All ranks attach it together, and step their optimizers in the same order.

    Args:
        scaler: the scaler, which is enabled.
        control: the side channel of this rank.
        device: the device of this rank.
    """

    def __init__(self, scaler: GradScaler, control: Control, device: torch.device) -> None:
        self._scaler, self._control, self._device = scaler, control, device

    @classmethod
    def of(cls, scaler: GradScaler | None, control: Control, device: torch.device) -> LossScale | None:
        """The scale of a run; None if there is no scaler, or one that is not enabled."""
        return cls(scaler, control, device) if scaler is not None and scaler.is_enabled() else None

    @property
    def factor(self) -> float:
        """The factor of the loss in the current step."""
        return self._scaler.get_scale()

    def attach(self) -> None:
        """Let all ranks agree on gradients that are not finite."""
        if self._control.num_processes > 1:
            check_gradients_by(self._scaler, self._agreed)

    def detach(self) -> None:
        """Undo `attach`."""
        check_gradients_plainly(self._scaler)

    def _agreed(self, found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """One number: above 0 if some gradient on some rank is not finite."""
        here = any(bool(each.item()) for each in found.values())
        anywhere = self._control.unanimous(here, everyone=False)
        return {self._device: torch.full((1,), float(anywhere), device=self._device)}


def check_scaled(options: Options) -> None:
    """Refuse options that a scaled loss does not support.

    Raises:
        ConfigError: names the option and a remedy.
    """
    problems = {
        "weights": (
            options.weights != SYNCHRONOUS,
            "would give mini-batches in flight different scales. Leave it out",
        ),
        "sharding": (options.sharding == "fsdp", "shards gradients, at which the scaler cannot look. Leave it out"),
        "on_nonfinite": (
            options.on_nonfinite in ("stop", "skip"),
            "is what the scaler does, on all ranks, which then takes a smaller scale. Leave it out",
        ),
    }
    refuse_beside("trainer.precision='16-mixed', which scales the loss (bf16-mixed does not)", options, problems)
