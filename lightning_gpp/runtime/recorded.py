"""Recorded stages: all that a stage launches for a micro-batch is recorded once, and launched at once from then on.

Small micro-batches are bound by the launches of their kernels. A `Recorder`, such as CUDA graphs, repeats a row of
launches as one, with the same tensors in the same memory:

    mini-batches 1, 2   run as always; parameters that get gradients are noted
    mini-batch 3        first the stages of this device are recorded, in the order of the program
    from then on        an action copies what it receives, repeats its record, and copies what it hands on

The records of a program share one pool of memory: what one keeps for another lies where no record in between writes,
because they are repeated in the order in which they were made. Gradients of parameters are added in place, so these
have the same tensors in every mini-batch. The user's step runs as always.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_gpp._compat.torch import (
    buffers_of,
    has_backward_hooks,
    hook_tables,
    parameters_of,
    with_gradient_hooks,
)
from lightning_gpp.runtime.recompute import ModuleState, Snapshot
from lightning_gpp.runtime.recorded_stage import RecordedStage, Recorder, Repeat, form_of, lengths_of
from lightning_gpp.runtime.stage import Recordable, Slot, StageModule
from lightning_gpp.schedules.actions import Action, Kind

log = logging.getLogger(__name__)

WARM: Final = 2
"""Mini-batches before a program is recorded: kernels are loaded, and the first odd size of an epoch has gone by."""
MOST: Final = 4
"""Records of one program in a row that are soon in vain; after so many, attributes that change are given up on."""
WORTH: Final = 50
"""Mini-batches after which a record was not in vain: what changes once in an epoch is recorded anew each time."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """The recorder of a job, and the tensors in which gradients of its parameters are added.

    `demanded`: whether to warn of what is not recorded.
    """

    recorder: Recorder
    demanded: bool = False
    gradients: dict[Parameter, Tensor] = field(default_factory=dict)


class RecordedProgram:
    """The recorded stages of a device's program, which flushes.

    Args:
        recording: the job's recorder and gradients.
        names: names of the program's stages, for messages.
        streams: the streams of stages that compute at the same time, of which 0 is the current one.

    Attributes:
        reasons: why stages are not recorded, by their numbers.
    """

    def __init__(self, recording: Recording, names: Sequence[str], streams: Mapping[int, int] | None = None) -> None:
        self._recording, self._names, self._streams = recording, names, streams or {}
        self._recorders = {0: recording.recorder}
        self._stages: dict[tuple[int, int], RecordedStage] = {}
        self._actions: list[Action] = []
        self._learned: list[Parameter] = []
        self._form: dict[int, Any] | None = None
        self._kept: list[Tensor] = []
        self._zero: Repeat | None = None
        self._runs, self._records = 0, 0
        self.reasons: dict[int, str] = {}

    def stage(self, action: Action, stage: StageModule, slots: Iterable[Slot], num_samples: int) -> StageModule:
        """The stage for the micro-batch of a forward; itself if it cannot be recorded."""
        key = action.stage, action.micro_batch
        if not isinstance(stage, Recordable):
            self.reasons[action.stage] = "it runs the training step as a whole, or slices of sequences"
            return stage
        if key not in self._stages:
            self._stages[key] = RecordedStage(stage, slots, num_samples)
        return self._stages[key]

    def note(self, action: Action) -> None:
        """Take note of a computing action, in the order of the program."""
        self._actions.append(action)
        stage = self._stages.get((action.stage, action.micro_batch))
        if stage is not None and action.kind is Kind.RECOMPUTE:
            stage.runs_again = True

    def weights(self, action: Action) -> None:
        """The part of a W that is recorded."""
        if (stage := self._stages.get((action.stage, action.micro_batch))) is not None:
            stage.repeat_weights()

    @property
    def recorded(self) -> set[int]:
        """Numbers of the stages that are recorded."""
        return set(self._numbers) if self._form is not None else set()

    def begin(self) -> None:
        """Before a mini-batch: record if it is time; if anything that a record depends on has changed, one mini-batch
        runs as always before.
        """
        for stage in self._stages.values():
            stage.begin()
        if self._form is not None and self._form != self._present_form():
            self._forget()
            self._records = 0 if self._runs > WORTH else self._records
            self._runs = WARM - 1
        if self._form is None and self._runs >= WARM and self._numbers:
            self._record()
        if self._form is not None:
            self._attach()

    def end(self) -> None:
        """After a mini-batch."""
        self._runs += 1
        if self._form is None:
            self._learned = [p for p in self._parameters() if p.grad is not None and p.requires_grad]

    @property
    def _numbers(self) -> dict[int, RecordedStage]:
        """One of the stages of each number that is recorded, or may be."""
        return {number: stage for (number, _), stage in self._stages.items() if number not in self.reasons}

    def _parts(self) -> list[nn.Module]:
        return [part for stage in self._numbers.values() for part in stage.parts]

    def _parameters(self) -> list[Parameter]:
        return list(dict.fromkeys(p for stage in self._numbers.values() for p in _parameters_of(stage)))

    def _present_form(self) -> dict[int, Any]:
        """All that records depend on: plain attributes of modules, and the memory of their tensors."""
        return {id(part): form_of(part) for part in self._parts()}

    def _attach(self) -> None:
        """Let gradients be added where records add them."""
        gradients = {parameter: self._recording.gradients[parameter] for parameter in self._learned}
        empty = [gradient for parameter, gradient in gradients.items() if parameter.grad is None]
        if len(empty) == len(gradients) and self._zero is not None:
            self._zero()
        else:
            _zero(empty)
        for parameter, gradient in gradients.items():
            if parameter.grad is not None and parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient

    def _forget(self) -> None:
        self._form = self._zero = None
        self._kept = []
        for stage in self._stages.values():
            stage.forget()

    def _record(self) -> None:
        self._records += 1
        start = time.perf_counter()
        gc.collect()  # graphs of earlier mini-batches would have gradients added in other streams
        for number, stage in self._numbers.items():
            if reason := self._reason(stage):
                self.reasons[number] = reason
        known, held = set(self._recording.gradients), {p: p.grad for p in self._parameters()}
        while self._numbers and not self._try(held):
            self._forget()
            for parameter, gradient in held.items():
                parameter.grad = gradient
        used = set(self._learned) if self._numbers else set()
        for parameter in self._recording.gradients.keys() - known - used:
            del self._recording.gradients[parameter]
        self._tell(time.perf_counter() - start)

    def _reason(self, stage: RecordedStage) -> str:
        parameters = _parameters_of(stage)
        if self._records > MOST:
            return "attributes or tensors of its modules change from step to step"
        if any(table for part in stage.parts for table in hook_tables(part)):
            return "its modules have hooks, which would not run"
        if any(map(has_backward_hooks, stage.parts)):
            return "its modules have hooks around their backward, which would not run"
        if with_gradient_hooks(parameters):
            return "its parameters have hooks, which would not run"
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            return "it has sparse gradients"
        if stage.runs_again and any(buffers_of(part) for part in stage.parts):
            return "it is recomputed, and has buffers"
        if stage.uses_random and any(self._streams.values()) and not self._recording.recorder.draws_apart:
            return "it draws random numbers beside other stages, whose graphs would change them before torch 2.13"
        return ""

    def _try(self, held: Mapping[Parameter, Tensor | None]) -> bool:
        """Record all stages that can be; False if another one cannot. Modules keep their attributes.

        `held`: the gradients of the parameters before.
        """
        gradients, here, before = self._recording.gradients, set(self._parameters()), self._traces()
        self._learned = [parameter for parameter in self._learned if parameter in here]
        for parameter in self._learned:
            if parameter not in gradients:
                gradients[parameter] = torch.zeros_like(parameter)
        self._attach()
        with ModuleState(self._parts()).restored(Snapshot([], [])):
            if not self._record_actions() or not self._check(before, held):
                return False
        self._form = self._present_form()
        self._kept = [value for part in self._parts() for value in vars(part).values() if isinstance(value, Tensor)]
        self._zero = self._recording.recorder.record(partial(_zero, [gradients[each] for each in self._learned]))
        return True

    def _record_actions(self) -> bool:
        for action in self._actions:
            if action.stage in self.reasons:
                continue
            try:
                self._stages[action.stage, action.micro_batch].record(action.kind, self._recorder_of(action.stage))
            except Exception as error:
                self.reasons[action.stage] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                return False
        return True

    def _recorder_of(self, stage: int) -> Recorder:
        """The recorder of a stage's stream, in which records are repeated one after the other."""
        number = self._streams.get(stage, 0)
        if number not in self._recorders:
            self._recorders[number] = self._recording.recorder.apart()
        return self._recorders[number]

    def _traces(self) -> dict[int, Any]:
        """All that a forward may change in modules: their form, and the lengths of their lists and dictionaries."""
        return {id(part): (form_of(part), lengths_of(part)) for part in self._parts()}

    def _check(self, before: Mapping[int, Any], held: Mapping[Parameter, Tensor | None]) -> bool:
        after, learned = self._traces(), set(self._learned)
        for number, stage in self._numbers.items():
            changed = [type(part).__name__ for part in stage.parts if before[id(part)] != after[id(part)]]
            if changed:
                self.reasons[number] = f"the forward of {changed[0]} sets attributes, which a record would not do"
            elif any(p.grad is not held[p] for p in _parameters_of(stage) if p not in learned):
                self.reasons[number] = "some of its parameters get gradients in some mini-batches only"
            if number in self.reasons:
                return False
        return True

    def _tell(self, seconds: float) -> None:
        done = ", ".join(self._names[number] for number in sorted(self.recorded)) or "none"
        log.info("strategy.cuda_graphs: recorded stages: %s (%.1f s).", done, seconds)
        for number, reason in self.reasons.items():
            level = logging.WARNING if self._recording.demanded else logging.INFO
            log.log(level, "strategy.cuda_graphs: stage %r is not recorded: %s.", self._names[number], reason)


def _parameters_of(stage: RecordedStage) -> list[Parameter]:
    return [p for part in stage.parts for p in parameters_of(part).values() if p is not None]


def _zero(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()
