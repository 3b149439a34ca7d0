"""Builds the modules that run a plan's stages, from a capture, or from a step that runs as a whole on the first device.

What needs no second device need not be cut, nor captured: with one device per pipeline every step can run, whatever it
does. With several, an evaluation step can that calls no module with parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_gpp.capture.attributes import Attribute
from lightning_gpp.capture.captured import Capture
from lightning_gpp.capture.isolate import add_sizes
from lightning_gpp.capture.recording import Event, Ref
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Operator, OperatorGraph
from lightning_gpp.plan import STEP, WHOLE, Plan, Stage
from lightning_gpp.planning.assignment.assign import assign, crossing, make_plan
from lightning_gpp.runtime.stage import DataSource, Slot, StageModule
from lightning_gpp.slices import unsliced
from lightning_gpp.stages.code import StageCode, variable
from lightning_gpp.stages.slices import Slicer, repeated
from lightning_gpp.stages.step import CapturedStage, StepAlone, StepRunner
from lightning_gpp.stages.user_step import UserStep, slots_of


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All parts of a pipeline that run: stages, the slots of every edge, the parameters and buffers of each stage by
    name, the user's step, and the source of the stages' inputs.

    `frozen`: attributes of modules that are cut, and those of the step that decide what it passes to them, with the
    values with which the stages compute. `live`: all that the step reads itself.
    """

    stages: tuple[StageModule, ...]
    slots: tuple[tuple[Slot, ...], ...]
    parameters: tuple[tuple[str, ...], ...]
    buffers: tuple[tuple[str, ...], ...]
    step: StepRunner
    source: DataSource
    frozen: Mapping[Attribute, Any] = field(default_factory=dict)
    live: Mapping[Attribute, Any] = field(default_factory=dict)


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


def build(captured: Captured, plan: Plan, module: nn.Module) -> Pipeline:
    """Build the stages of a plan from the modules of `module`.

    Args:
        captured: what the plan was made for.
        plan: the plan, which names the modules of each stage.
        module: the module that was captured, or a copy of it.

    Raises:
        CaptureError: the plan cuts a module that cannot be cut.
        PlanError: the plan's edges or modules are not those of `captured`.
    """
    if isinstance(captured, Undivided):
        return _alone(captured, module)
    return _in_slices(captured, plan, module) if plan.is_sliced else _Builder(captured, plan, module).pipeline()


def _in_slices(capture: Capture, plan: Plan, module: nn.Module) -> Pipeline:
    whole = unsliced(plan)
    built = _Builder(capture, whole.plan, module).pipeline()
    uncut = {
        variable(_ref((name, output)))
        for name in capture.graph.whole
        for output in range(len(capture.graph[name].outputs))
    }
    slicer = Slicer(capture.graph, plan, whole, built.slots, uncut)
    return replace(
        built,
        stages=slicer.stages(built.stages),
        slots=slicer.slots(),
        parameters=repeated(built.parameters, whole),
        buffers=repeated(built.buffers, whole),
        source=slicer.source(built.step),
    )


class _Builder:
    """Builds the stages of a plan without slices."""

    def __init__(self, capture: Capture, plan: Plan, module: nn.Module) -> None:
        self._capture, self._plan, self._module = capture, plan, module
        self._graph, self._network = capture.graph, capture.network
        self._assignment = assign(capture.graph, [stage.modules for stage in plan.stages])
        self._flows = crossing(capture.graph, self._assignment)
        self._check_edges()
        keys = slots_of(capture.network.inputs)
        self._step = UserStep(
            network=capture.network,
            module=module,
            specs=capture.specs,
            input_keys=keys,
            input_specs=dict(zip(keys, capture.inputs, strict=True)),
            returns_loss=capture.step == "training_step",
            dims=capture.dims,
            opened=capture.opened,
        )

    def pipeline(self) -> Pipeline:
        stages = tuple(map(self._stage, range(len(self._plan.stages))))
        self._check_changes(stages)
        recording = self._network.recording
        return Pipeline(
            stages=stages,
            slots=tuple(self._slots(edge.src, edge.dst) for edge in self._plan.edges),
            parameters=tuple(stage.parameters for stage in stages),
            buffers=tuple(stage.buffers for stage in stages),
            step=self._step,
            source=self._step,
            frozen={**recording.decisive, **{key: value for each in stages for key, value in each.frozen.items()}},
            live=recording.attributes.get(-1, {}),
        )

    def _check_edges(self) -> None:
        planned = {(edge.src, edge.dst) for edge in self._plan.edges if not edge.artificial}
        if planned != set(self._flows):
            raise PlanError(
                f"The plan was made for another model: its edges are {sorted(planned)}, the model's "
                f"{sorted(self._flows)}. Make a new plan: gpp-plan ... output=plan.yaml."
            )

    def _check_changes(self, stages: Sequence[CapturedStage]) -> None:
        """A tensor that changes in place has to be the same one for all stages that use it."""
        for change in self._network.recording.noted(Event.CHANGES_STATE):
            pairs = zip(self._plan.stages, stages, strict=True)
            users = [stage for stage, part in pairs if change.subject in part.states]
            if len({stage.devices for stage in users}) > 1:
                names = " and ".join(repr(stage.name) for stage in users)
                raise PlanError(
                    f"{change.line} changes {change.subject!r} in place, and the stages {names} use it on different "
                    "devices, each of which would have a copy of its own. Put the modules that use it into one stage "
                    "(strategy.stages)."
                )

    def _stage(self, index: int) -> CapturedStage:
        operators = {each.name: each for each in self._graph if index in self._assignment[each.name]}
        mine = {_number(name) for name in operators if name != "step"}
        received = dict.fromkeys(_ref(v) for (_, dst), values in self._flows.items() if dst == index for v in values)
        sent = dict.fromkeys(_ref(v) for (src, _), values in self._flows.items() if src == index for v in values)
        holds_step = STEP in self._plan.stages[index].modules
        answers = [ref for ref in self._network.needed if ref.call in mine] if holds_step else []
        code = StageCode(
            self._network,
            self._module,
            mine,
            list(received),
            wanted=list(dict.fromkeys([*sent, *answers])),
            specs=self._step.spec_of,
            recomputed=self._plan.stages[index].recomputed_blocks,
            unneeded=self._unneeded(),
        )
        forward = code.compile()
        states = code.used_states | {name for op in operators.values() for name in (*op.parameters, *op.buffers)}
        parameters = tuple(name for name in self._graph.parameter_sizes if name in states)
        buffers = tuple(name for name in self._graph.buffer_bytes if name in states)
        return CapturedStage(
            code=forward,
            source=code.source(),
            uses_random=any(operator.random for operator in operators.values()),
            parameters=parameters,
            buffers=buffers,
            parts=_parts(self._module, code.modules, [*parameters, *buffers]),
            step=self._step if holds_step else None,
            frozen=code.frozen,
        )

    def _unneeded(self) -> frozenset[int]:
        """Numbers of the recorded calls that no stage runs; those that use parameters need a stage that has them."""
        operators = (self._graph[name] for name, stages in self._assignment.items() if not stages)
        return frozenset(_number(each.name) for each in operators if not (each.parameters or each.buffers))

    def _slots(self, src: int, dst: int) -> tuple[Slot, ...]:
        values = self._flows.get((src, dst), [])
        return tuple(Slot(variable(_ref((name, n))), self._graph[name].outputs[n]) for name, n in values)


def _parts(module: nn.Module, paths: Sequence[str], states: Sequence[str]) -> tuple[nn.Module, ...]:
    """Modules that a stage calls, with their submodules, and the owners of tensors that it reads directly."""
    whole = [part for path in paths for part in module.get_submodule(path).modules()]
    owners = [module.get_submodule(name.rpartition(".")[0]) for name in states]
    return tuple(dict.fromkeys([*whole, *owners]))


def _number(operator: str) -> int:
    return int(operator.partition("_")[0])


def _ref(value: tuple[str, int]) -> Ref:
    name, output = value
    return Ref(-1 - int(name.removeprefix("input"))) if name.startswith("input") else Ref(_number(name), output)


def _alone(captured: Undivided, module: nn.Module) -> Pipeline:
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
