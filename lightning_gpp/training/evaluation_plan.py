"""The stages of a plan, for evaluation steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

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


def evaluation_plan(captured: Captured, plan: Plan, *, all_cut: bool = False) -> Plan:
    """The plan's stages for an evaluation step, which runs once per mini-batch behind the micro-batches.

    If a value cannot be joined from micro-batches, the step runs once per micro-batch, as in training. If the network
    lets samples depend on each other, the mini-batch is not cut.

    Args:
        captured: the step.
        plan: the plan of the run.
        all_cut: whether the mini-batch is cut only if all tensors that the step hands to the network are.
    """
    if isinstance(captured, Undivided):
        return captured.plan(plan.num_devices)
    made = _evaluation_plan(captured, plan)
    is_cut = all(edge.sliceable for edge in made.edges if edge.src == SOURCE)
    if mixes_into_samples(captured.graph) or (all_cut and not is_cut):
        made = _undivided(captured, plan)
    return replace(made, sharding=plan.sharding)


def _undivided(captured: Capture | Declared, plan: Plan) -> Plan:
    """The plan's stages, which take the undivided mini-batch, each on the first of its devices."""
    graph, stages = captured.graph, _with_others(unsliced(plan).plan.stages, captured.graph)
    alone = [replace(stage, micro_batch_size=WHOLE, devices=stage.devices[:1], round_robin=False) for stage in stages]
    unused = set(range(plan.num_devices)) - {device for stage in alone for device in stage.devices}
    return make_plan(graph, alone, batch_size=captured.batch_size, schedule="gpipe", unused=tuple(sorted(unused)))


def _evaluation_plan(captured: Captured, plan: Plan) -> Plan:
    stages = _whole_micro_batches(_with_others(unsliced(plan).plan.stages, captured.graph), captured.graph)
    made = partial(
        make_plan, captured.graph, batch_size=captured.batch_size, schedule=plan.schedule, unused=plan.unused
    )
    if isinstance(captured, Capture):
        apart = made(separated(stages, WHOLE))
        if all(edge.sliceable for edge in apart.edges if edge.src == SOURCE or edge.dst == apart.step_stage):
            return apart
    return made(stages)


def _with_others(stages: Sequence[Stage], graph: OperatorGraph) -> list[Stage]:
    """The stages; modules that training does not call join that of the user's step, which has their parameters."""
    owners = {module: index for index, stage in enumerate(stages) for module in stage.modules if module != STEP}
    called = {operator.module: None for operator in graph if operator.parameters and operator.module != STEP}
    divided = around(owners)
    others = tuple(module for module in called if module not in divided and owner_of(module, owners) is None)
    return [replace(s, modules=(*s.modules, *others)) if STEP in s.modules else s for s in stages]


def _whole_micro_batches(stages: Sequence[Stage], graph: OperatorGraph) -> list[Stage]:
    """The stages; replicas that cannot share a micro-batch in this step take micro-batches in turn."""
    mixing = mixing_stages(graph, assign(graph, [stage.modules for stage in stages]))
    return [replace(stage, round_robin=stage.round_robin or index in mixing) for index, stage in enumerate(stages)]
