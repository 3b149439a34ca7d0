"""A step that runs as a whole on the first device: what needs no second device need not be cut, nor captured.

With one device per pipeline every step can run, whatever it does. With several, an evaluation step can that calls no
module with parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_gpp.capture import Capture
from lightning_gpp.capture.isolate import add_sizes
from lightning_gpp.graph import Operator, OperatorGraph
from lightning_gpp.plan import STEP, WHOLE, Plan, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.stages.build import Pipeline, build
from lightning_gpp.stages.step import StepRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Undivided:
    """Replaces a `Capture` for a step that runs as a whole.

    Args:
        graph: one operator, the step, with all parameters and buffers that it may use.
        step: its name.
        batch_size: samples of the mini-batch.
        reason: the reason why it was not captured.
    """

    graph: OperatorGraph
    step: str
    batch_size: int
    reason: str

    @property
    def notes(self) -> list[str]:
        """Remarks for people."""
        return [f"{self.step} runs as a whole on one device, on undivided mini-batches. {self.reason}"]

    @property
    def fingerprint(self) -> str:
        """Equal for equal steps of modules with equal parameters."""
        return hashlib.sha256(f"{self.step} {sorted(self.graph.parameter_sizes.items())}".encode()).hexdigest()[:16]

    def plan(self, num_devices: int) -> Plan:
        """One stage on device 0; the others have nothing to do."""
        stage = Stage(name=STEP, modules=(STEP,), devices=(0,), micro_batch_size=WHOLE)
        unused = tuple(range(1, num_devices))
        return make_plan(self.graph, [stage], batch_size=self.batch_size, model=self.fingerprint, unused=unused)


Captured = Capture | Undivided
"""The computation of a step: captured, or as a whole."""


def undivided(module: nn.Module, step: str, batch_size: int, reason: str, *, alone: bool) -> Undivided:
    """The step of a module as a whole.

    Args:
        module: the LightningModule.
        step: name of the step.
        batch_size: samples of the mini-batch.
        reason: the reason why it is not captured, for people.
        alone: whether the first device has all parameters; otherwise the step must not use any.
    """
    graph = OperatorGraph()
    add_sizes(graph, module)
    parameters, buffers = (tuple(graph.parameter_sizes), tuple(graph.buffer_bytes)) if alone else ((), ())
    graph.add(Operator(name="step", target="step", module=STEP, parameters=parameters, buffers=buffers))
    return Undivided(graph=graph, step=step, batch_size=batch_size, reason=reason)


@build.register
def _build_undivided(captured: Undivided, plan: Plan, module: nn.Module) -> Pipeline:
    operator = captured.graph["step"]
    step = StepRunner(module=module, returns_loss=captured.step == "training_step")
    return Pipeline(
        stages=(StepAlone(step, tuple(module.modules())),),
        slots=(),
        parameters=(operator.parameters,),
        buffers=(operator.buffers,),
        step=step,
        source=step,
    )


@dataclass(slots=True)
class StepAlone:
    """Runs the user's step with its modules."""

    step: StepRunner
    parts: tuple[nn.Module, ...]
    uses_random: bool = True

    def forward(self, values: Mapping[str, torch.Tensor], micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """The loss of a mini-batch, in training."""
        return self.step.finish(micro_batch, self.step.whole(micro_batch))
