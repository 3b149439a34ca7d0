"""Checks slices on the first micro-batch: they must compute the same as the unsliced stage.

Otherwise a model that counts its tokens itself, or whose tokens depend on later ones, would be trained wrongly without
notice. Both sides run again without gradients; modules that draw random numbers run in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lightning_gpp.errors import SelfCheckError
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.module_state import ModuleState
from lightning_gpp.runtime.stage import MicroBatch, StageModule, StageWrapper
from lightning_gpp.slices import unsliced
from lightning_gpp.stages.slices import SlicedStage

TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Tolerances of results, relative to the largest entry."""


def checked_slices(
    stages: Sequence[StageModule], plan: Plan, precision: torch.dtype = torch.float64
) -> list[StageModule]:
    """The stages; slices are compared with the unsliced stage once.

    Args:
        stages: the plan's stages.
        plan: the plan, with slices.
        precision: the least precise type that modules compute in.
    """
    whole = unsliced(plan)
    checks = {
        number: _Check(whole.plan.stages[number].name, [stages[part] for part in parts], plan.sequence_dim, precision)
        for number in range(len(whole.plan.stages))
        if plan.stages[(parts := whole.parts(number))[0]].tokens is not None
    }
    return [
        CheckedSlice(stage, checks[number]) if number in checks else stage
        for stage, number in zip(stages, whole.numbers, strict=True)
    ]


@dataclass(slots=True, eq=False)
class CheckedSlice(StageWrapper):
    """A slice that hands its first inputs to a check."""

    check: _Check

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The slice's results, after a check of the first ones."""
        if not self.check.done and micro_batch.num_samples:
            self.check.add(values, micro_batch)
        return self.stage.forward(values, micro_batch)


class _Check:
    """Collects the inputs of all slices of a stage for one micro-batch, and compares."""

    def __init__(self, name: str, slices: Sequence[StageModule], dim: int, precision: torch.dtype) -> None:
        self.done = False
        self._precision = precision
        self._slices = [stage for stage in slices if isinstance(stage, SlicedStage)]
        self._name, self._dim = name, dim
        self._micro_batch: MicroBatch | None = None
        self._inputs: list[dict[str, Tensor]] = []

    def add(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> None:
        """Add the inputs of the next slice; those of other micro-batches are ignored."""
        self._micro_batch = self._micro_batch or micro_batch
        if micro_batch != self._micro_batch:
            return
        self._inputs.append({name: value.detach() for name, value in values.items()})
        if len(self._inputs) == len(self._slices):
            self.done = True
            self._compare(self._inputs, micro_batch)
            self._inputs = []

    def _compare(self, inputs: Sequence[Mapping[str, Tensor]], micro_batch: MicroBatch) -> None:
        stage = self._slices[0]
        with torch.no_grad():
            with self._undisturbed():
                split = list(self._in_slices(inputs, micro_batch))
            with self._undisturbed():
                whole = stage.stage.forward(self._joined(inputs), micro_batch)
        for cut in stage.sent:
            joined = torch.cat([outputs[cut.name] for outputs in split], self._dim)
            self._judge(joined, whole[cut.name])

    def _in_slices(
        self, inputs: Sequence[Mapping[str, Tensor]], micro_batch: MicroBatch
    ) -> Iterator[dict[str, Tensor]]:
        kept: Sequence[Tensor] = ()
        for stage, values in zip(self._slices, inputs, strict=True):
            outputs, kept = stage.carried(values, kept if stage.earlier else (), micro_batch)
            yield outputs

    def _joined(self, inputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        parts = [
            {cut.name: values[cut.part] for cut in stage.received}
            for stage, values in zip(self._slices, inputs, strict=True)
        ]
        return {**inputs[0], **{name: torch.cat([part[name] for part in parts], self._dim) for name in parts[0]}}

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Restore buffers and attributes of the modules afterwards."""
        modules = [part for part in self._slices[0].parts if part.training]
        state = ModuleState(self._slices[0].parts)
        with state.restored(state.snapshot()):
            for part in modules if self._slices[0].uses_random else ():
                part.training = False
            yield

    def _judge(self, split: Tensor, whole: Tensor) -> None:
        tolerance = max(TOLERANCES.get(kind, 0.0) for kind in (whole.dtype, self._precision))
        scale = whole.abs().max().item() if whole.is_floating_point() else 0.0
        error = (split - whole).abs().max().item() if split.shape == whole.shape else float("inf")
        if not error <= tolerance * max(scale, 1e-6):
            raise SelfCheckError(
                f"Stage {self._name!r} does not compute the same in slices (strategy.slices) as unsliced: a result "
                f"differs by {error:.3g}, its largest entry is {scale:.3g}. A wrong model would be trained, so "
                "training was stopped. Likely causes: a module whose tokens depend on later ones, or on earlier ones "
                "without lightning_gpp.sequence.carry or causal_attention; or one that counts tokens without "
                "positions. Exclude such modules with strategy.slice_modules, or remove strategy.slices."
            )
