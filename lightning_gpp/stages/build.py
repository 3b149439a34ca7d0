"""Builds the modules that run a plan's stages, from a capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lightning_gpp.capture.attributes import Attribute
from lightning_gpp.capture.captured import Capture
from lightning_gpp.capture.operators import name_of
from lightning_gpp.capture.recording import Ref
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import TensorSpec
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.assign import Assignment, assign, crossing
from lightning_gpp.runtime.stage import DataSource, MicroBatch, Slot, StageModule
from lightning_gpp.slices import unsliced
from lightning_gpp.stages.code import StageCode, variable
from lightning_gpp.stages.slices import Slicer, repeated
from lightning_gpp.stages.step import StepRunner
from lightning_gpp.stages.user_step import UserStep, slots_of


@dataclass(slots=True)
class CapturedStage:
    """Runs the source of a stage, followed by the user's step if the stage has it."""

    code: FunctionType
    source: str
    uses_random: bool
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    modules: tuple[str, ...]
    parts: tuple[nn.Module, ...]
    step: UserStep | None
    sent: tuple[str, ...]
    frozen: Mapping[Attribute, Any]

    @property
    def states(self) -> tuple[str, ...]:
        """The parameters and buffers that the stage uses."""
        return (*self.parameters, *self.buffers)

    def forward(self, values: Mapping[str, torch.Tensor], micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        results: dict[str, torch.Tensor] = self.code(dict(values), micro_batch.num_samples)
        if self.step is None:
            return results
        return {**results, **self.step.run(micro_batch, {**values, **results})}


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


@singledispatch
def build(captured: Any, plan: Plan, module: nn.Module) -> Pipeline:
    """Build the stages of a plan from the modules of `module`.

    Args:
        captured: the `Capture` or `Undivided` that the plan was made for.
        plan: the plan, which names the modules of each stage.
        module: the module that was captured, or a copy of it.

    Raises:
        CaptureError: the plan cuts a module that cannot be cut.
        PlanError: the plan's edges or modules are not those of `captured`.
    """
    raise TypeError(f"No stages can be built of a {type(captured).__name__}.")


@build.register
def _build_captured(capture: Capture, plan: Plan, module: nn.Module) -> Pipeline:
    return _in_slices(capture, plan, module) if plan.is_sliced else _whole(capture, plan, module)


def _in_slices(capture: Capture, plan: Plan, module: nn.Module) -> Pipeline:
    whole = unsliced(plan)
    built = _whole(capture, whole.plan, module)
    uncut = {
        variable(_ref((name, output)))
        for name in capture.graph.whole
        for output in range(len(capture.graph[name].outputs))
    }
    slicer = Slicer(capture.graph, plan, whole, built.slots, uncut)
    return Pipeline(
        stages=slicer.stages(built.stages),
        slots=slicer.slots(),
        parameters=repeated(built.parameters, whole),
        buffers=repeated(built.buffers, whole),
        step=built.step,
        source=slicer.source(built.step),
        frozen=built.frozen,
        live=built.live,
    )


def _whole(capture: Capture, plan: Plan, module: nn.Module) -> Pipeline:
    assignment = assign(capture.graph, [stage.modules for stage in plan.stages])
    flows = crossing(capture.graph, assignment)
    _check_edges(plan, flows)
    step = _user_step(capture, module)
    stages = tuple(_stage(capture, plan, module, assignment, flows, i, step) for i in range(len(plan.stages)))
    _check_changes(capture, plan, stages)
    slots = tuple(_slots(capture, flows.get((edge.src, edge.dst), [])) for edge in plan.edges)
    return Pipeline(
        stages=stages,
        slots=slots,
        parameters=tuple(stage.parameters for stage in stages),
        buffers=tuple(stage.buffers for stage in stages),
        step=step,
        source=step,
        frozen={
            **capture.network.recording.decisive,
            **{key: value for stage in stages for key, value in stage.frozen.items()},
        },
        live=capture.network.recording.attributes.get(-1, {}),
    )


def _user_step(capture: Capture, module: nn.Module) -> UserStep:
    keys = slots_of(capture.network.inputs)
    return UserStep(
        network=capture.network,
        module=module,
        specs=capture.specs,
        input_keys=keys,
        input_specs=dict(zip(keys, capture.inputs, strict=True)),
        returns_loss=capture.step == "training_step",
        dims=capture.dims,
        opened=capture.opened,
    )


def _check_edges(plan: Plan, flows: Mapping[tuple[int, int], object]) -> None:
    planned = {(edge.src, edge.dst) for edge in plan.edges if not edge.artificial}
    if planned != set(flows):
        raise PlanError(
            f"The plan was made for another model: its edges are {sorted(planned)}, the model's {sorted(flows)}. "
            "Make a new plan with gpp-plan, or remove strategy.plan."
        )


def _check_changes(capture: Capture, plan: Plan, stages: Sequence[CapturedStage]) -> None:
    """A tensor that changes in place has to be the same one for all stages that use it."""
    for change in capture.network.recording.state_changes:
        users = [stage for stage, part in zip(plan.stages, stages, strict=True) if change.name in part.states]
        if len({stage.devices for stage in users}) > 1:
            names = " and ".join(repr(stage.name) for stage in users)
            raise PlanError(
                f"{change.line} changes {change.name!r} in place, and the stages {names} use it on different devices, "
                "each of which would have a copy of its own. Put the modules that use it into one stage "
                "(strategy.stages)."
            )


def _stage(
    capture: Capture,
    plan: Plan,
    module: nn.Module,
    assignment: Assignment,
    flows: Mapping[tuple[int, int], list[tuple[str, int]]],
    index: int,
    step: UserStep,
) -> CapturedStage:
    operators = {operator.name: operator for operator in capture.graph if index in assignment[operator.name]}
    mine = {_number(name) for name in operators if name != "step"}
    received = dict.fromkeys(_ref(v) for pair, values in flows.items() if pair[1] == index for v in values)
    sent = dict.fromkeys(_ref(v) for pair, values in flows.items() if pair[0] == index for v in values)
    holds_step = STEP in plan.stages[index].modules
    answers = [ref for ref in capture.network.needed if ref.call in mine] if holds_step else []
    wanted = list(dict.fromkeys([*sent, *answers]))
    specs = lambda ref: _spec(capture, (name_of(ref.call, capture.network), ref.output))  # noqa: E731
    blocks = plan.stages[index].recomputed_blocks
    unneeded = _unneeded(capture, assignment)
    code = StageCode(capture.network, module, mine, list(received), wanted, specs, blocks, unneeded)
    forward = code.compile()
    states = code.used_states | {name for op in operators.values() for name in (*op.parameters, *op.buffers)}
    parameters = tuple(name for name in capture.graph.parameter_sizes if name in states)
    buffers = tuple(name for name in capture.graph.buffer_bytes if name in states)
    return CapturedStage(
        code=forward,
        source=code.source(),
        uses_random=any(operator.random for operator in operators.values()),
        parameters=parameters,
        buffers=buffers,
        modules=tuple(code.modules),
        parts=_parts(module, code.modules, [*parameters, *buffers]),
        step=step if holds_step else None,
        sent=tuple(variable(ref) for ref in sent),
        frozen=code.frozen,
    )


def _parts(module: nn.Module, paths: Sequence[str], states: Sequence[str]) -> tuple[nn.Module, ...]:
    """Modules that a stage calls, with their submodules, and the owners of tensors that it reads directly."""
    whole = [part for path in paths for part in module.get_submodule(path).modules()]
    owners = [module.get_submodule(name.rpartition(".")[0]) for name in states]
    return tuple(dict.fromkeys([*whole, *owners]))


def _unneeded(capture: Capture, assignment: Assignment) -> frozenset[int]:
    """Numbers of the recorded calls that no stage runs; those that use parameters need a stage that has them."""
    names = (name for name, stages in assignment.items() if not stages)
    operators = (capture.graph[name] for name in names)
    return frozenset(_number(each.name) for each in operators if not (each.parameters or each.buffers))


def _number(operator: str) -> int:
    return int(operator.partition("_")[0])


def _ref(value: tuple[str, int]) -> Ref:
    name, output = value
    return Ref(-1 - int(name.removeprefix("input"))) if name.startswith("input") else Ref(_number(name), output)


def _slots(capture: Capture, values: list[tuple[str, int]]) -> tuple[Slot, ...]:
    return tuple(Slot(variable(_ref(value)), _spec(capture, value)) for value in values)


def _spec(capture: Capture, value: tuple[str, int]) -> TensorSpec:
    return capture.graph[value[0]].outputs[value[1]]
