"""The stages of a plan, for evaluation steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

from lightning_gpp.capture import Capture
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import SOURCE, STEP, WHOLE, Plan, Stage
from lightning_gpp.planning.assignment.assign import (
    assign,
    make_plan,
    mixes_into_samples,
    mixing_stages,
    owner_of,
)
from lightning_gpp.planning.assignment.modules import around
from lightning_gpp.planning.assignment.rebuild import separated
from lightning_gpp.slices import unsliced
from lightning_gpp.stages.declared import Declared
from lightning_gpp.stages.undivided import Captured, Undivided

Held = Mapping[str, Sequence[int]]
"""The devices that hold each parameter and buffer, by name."""
NOWHERE: Final[Held] = MappingProxyType({})


def evaluation_plan(captured: Captured, plan: Plan, held: Held = NOWHERE, *, all_cut: bool = False) -> Plan:
    """The plan's stages for an evaluation step, which runs once per mini-batch behind the micro-batches.

    If a value cannot be joined from micro-batches, the step runs once per micro-batch, as in training. If the network
    lets samples depend on each other, the mini-batch is not cut.

    Args:
        captured: the step.
        plan: the plan of the run.
        held: the devices that hold the parameters of modules that training does not call; by default that of the step.
        all_cut: whether the mini-batch is cut only if all tensors that the step hands to the network are.
    """
    if isinstance(captured, Undivided):
        return captured.plan(plan.num_devices)
    training = unsliced(plan).plan.stages
    stages = _with_others(training, captured.graph, held)
    kept = replace(plan, schedule=plan.schedule if len(stages) == len(training) else "gpipe")
    made = _evaluation_plan(captured, stages, kept)
    is_cut = all(edge.sliceable for edge in made.edges if edge.src == SOURCE)
    if mixes_into_samples(captured.graph) or (all_cut and not is_cut):
        made = _undivided(captured, stages, plan)
    return replace(made, sharding=plan.sharding)


def _undivided(captured: Capture | Declared, stages: Sequence[Stage], plan: Plan) -> Plan:
    """Stages that take the undivided mini-batch, each on the first of its devices."""
    alone = [replace(stage, micro_batch_size=WHOLE, devices=stage.devices[:1], round_robin=False) for stage in stages]
    unused = set(range(plan.num_devices)) - {device for stage in alone for device in stage.devices}
    sizes = partial(make_plan, captured.graph, alone, batch_size=captured.batch_size)
    return sizes(schedule="gpipe", unused=tuple(sorted(unused)))


def _evaluation_plan(captured: Capture | Declared, given: Sequence[Stage], plan: Plan) -> Plan:
    stages = _whole_micro_batches(given, captured.graph)
    made = partial(
        make_plan, captured.graph, batch_size=captured.batch_size, schedule=plan.schedule, unused=plan.unused
    )
    if isinstance(captured, Capture):
        apart = made(separated(stages, WHOLE))
        if all(edge.sliceable for edge in apart.edges if edge.src == SOURCE or edge.dst == apart.step_stage):
            return apart
    return made(stages)


def _with_others(stages: Sequence[Stage], graph: OperatorGraph, held: Held) -> list[Stage]:
    """The stages, and modules that training does not call: in that of the user's step, or in stages of their own on the
    devices that have their parameters.
    """
    apart = defaultdict[int, list[str]](list)
    for module, names in _others(stages, graph).items():
        apart[_stage_with(names, stages, held)].append(module)
    step = next(index for index, stage in enumerate(stages) if STEP in stage.modules)
    joined = apart.pop(step, [])
    kept = [replace(s, modules=(*s.modules, *joined)) if index == step else s for index, s in enumerate(stages)]
    return [*kept, *(_beside(stages[index], modules) for index, modules in sorted(apart.items()))]


def _others(stages: Sequence[Stage], graph: OperatorGraph) -> dict[str, list[str]]:
    """The modules of no stage, and the parameters that they use."""
    owners = {module: index for index, stage in enumerate(stages) for module in stage.modules if module != STEP}
    divided, found = around(owners), defaultdict[str, list[str]](list)
    for operator in graph:
        called = operator.module != STEP and operator.module not in divided
        if operator.parameters and called and owner_of(operator.module, owners) is None:
            found[operator.module] += operator.parameters
    return found


def _stage_with(names: Sequence[str], stages: Sequence[Stage], held: Held) -> int:
    """The stage on the devices that hold all these parameters; that of the user's step if there is none."""
    step = next(index for index, stage in enumerate(stages) if STEP in stage.modules)
    common = set.intersection(*({*held.get(name, stages[step].devices)} for name in names))
    if common.issuperset(stages[step].devices):
        return step
    return next((index for index, stage in enumerate(stages) if common.issuperset(stage.devices)), step)


def _beside(stage: Stage, modules: Sequence[str]) -> Stage:
    """A stage of other modules on the same devices."""
    return replace(stage, name=f"{stage.name}, copies", modules=tuple(modules), recompute=False, offload=False, slack=0)


def _whole_micro_batches(stages: Sequence[Stage], graph: OperatorGraph) -> list[Stage]:
    """The stages; replicas that cannot share a micro-batch in this step take micro-batches in turn."""
    mixing = mixing_stages(graph, assign(graph, [stage.modules for stage in stages]))
    return [replace(stage, round_robin=stage.round_robin or index in mixing) for index, stage in enumerate(stages)]
