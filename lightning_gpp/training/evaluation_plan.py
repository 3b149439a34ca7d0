"""Evaluation steps: the stages of a plan for them, and which cannot run on micro-batches, but as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

import networkx as nx

from lightning_gpp.capture import Capture
from lightning_gpp.capture.recording import Event, Ref
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.graph import Operator, OperatorGraph
from lightning_gpp.plan import SOURCE, STEP, WHOLE, Plan, Stage
from lightning_gpp.planning.assignment.assign import (
    assign,
    make_plan,
    mixes_into_samples,
    mixing_stages,
    owner_of,
)
from lightning_gpp.planning.assignment.complete import separated
from lightning_gpp.planning.assignment.modules import around
from lightning_gpp.slices import unsliced
from lightning_gpp.stages.build import Captured, Undivided
from lightning_gpp.stages.user_step import UserStep

Held = Mapping[str, Sequence[int]]
"""The devices that hold each parameter and buffer, by name."""
NOWHERE: Final[Held] = MappingProxyType({})


def evaluation_plan(
    captured: Captured, plan: Plan, held: Held = NOWHERE, *, all_cut: bool = False, uncut: bool = False
) -> Plan:
    """The plan's stages for an evaluation step, which runs once per mini-batch behind the micro-batches.

    The mini-batch is not cut if a value that the step reads cannot be joined from micro-batches, or if the network lets
    samples depend on each other.

    Args:
        captured: the step.
        plan: the plan of the run.
        held: the devices that hold the parameters of modules that training does not call; by default that of the step.
        all_cut: whether the mini-batch is cut only if all tensors that the step hands to the network are.
        uncut: whether it is not cut at all.
    """
    if isinstance(captured, Undivided):
        return captured.plan(plan.num_devices)
    training = unsliced(plan).plan.stages
    stages = with_others(training, captured.graph, held)
    kept = replace(plan, schedule=plan.schedule if len(stages) == len(training) else "gpipe")
    made = _evaluation_plan(captured, stages, kept)
    is_cut = all(edge.sliceable for edge in made.edges if edge.src == SOURCE)
    runs_once = made.stages[made.step_stage].micro_batch_size == WHOLE
    if uncut or mixes_into_samples(captured.graph) or (all_cut and not is_cut) or not runs_once:
        made = _undivided(captured, stages, plan)
    return replace(made, sharding=plan.sharding)


def _undivided(captured: Capture, stages: Sequence[Stage], plan: Plan) -> Plan:
    """Stages that take the undivided mini-batch, each on the first of its devices."""
    alone = [replace(stage, micro_batch_size=WHOLE, devices=stage.devices[:1], round_robin=False) for stage in stages]
    unused = set(range(plan.num_devices)) - {device for stage in alone for device in stage.devices}
    sizes = partial(make_plan, captured.graph, alone, batch_size=captured.batch_size)
    return sizes(schedule="gpipe", unused=tuple(sorted(unused)))


def _evaluation_plan(captured: Capture, given: Sequence[Stage], plan: Plan) -> Plan:
    stages = _whole_micro_batches(given, captured.graph)
    made = partial(
        make_plan, captured.graph, batch_size=captured.batch_size, schedule=plan.schedule, unused=plan.unused
    )
    apart = made(separated(stages, WHOLE))
    cut = all(edge.sliceable for edge in apart.edges if edge.src == SOURCE or edge.dst == apart.step_stage)
    return apart if cut else made(stages)


def _whole_micro_batches(stages: Sequence[Stage], graph: OperatorGraph) -> list[Stage]:
    """The stages; replicas that cannot share a micro-batch in this step take micro-batches in turn."""
    mixing = mixing_stages(graph, assign(graph, [stage.modules for stage in stages]))
    return [replace(stage, round_robin=stage.round_robin or index in mixing) for index, stage in enumerate(stages)]


_BY_POSITION: Final = {
    *("__getitem__", "__setitem__", "index_select", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("index_put", "index_put_", "index_fill", "index_fill_"),
}


def check_decisions(step: UserStep) -> None:
    """Refuse a step that decides by data, or whose recording ended before the step did: it may call the network again.

    Raises:
        CaptureError: it does.
    """
    recording = step.network.recording
    decisions = recording.noted(Event.READS_TRUTH)
    if recording.complete and not decisions:
        return
    line = decisions[-1].line if recording.complete else recording.stopped.partition(": ")[0]
    raise refusal(
        line,
        "what the step does depends on data, perhaps also how often it calls the network",
        "decide inside of a module's forward, or compute without a decision (torch.where)",
    )


def check_positions(step: UserStep) -> None:
    """Refuse a step that indexes results of the network by positions in the mini-batch (`h[torch.arange(len(h)), y]`).

    In evaluation the step runs once per mini-batch, and its tensors are cut for micro-batches, in which samples have
    other positions.

    Raises:
        CaptureError: it does.
    """
    for call in step.network.calls:
        if call.scope == -1 and call.target in _BY_POSITION and any(_has_positions(step, ref) for ref in call.refs()):
            raise refusal(
                call.line,
                "the step indexes results of the network by positions of samples in the mini-batch",
                "do it in a module's forward, or behind the step's last call of a module",
            )


def _has_positions(step: UserStep, ref: Ref) -> bool:
    """True for whole numbers of all samples that the step has made, or has got from the mini-batch."""
    spec = step.spec_of(ref)
    return ref.call < 0 and spec.varies and "int" in spec.dtype


_CLUSTER: Final = "reductions"


def with_reductions_in_step(captured: Capture) -> Capture:
    """The capture with the operators that combine samples, and all that follow from them, in the stage of the step.

    In training a loss that a module computes is that of a micro-batch; in evaluation the step runs once, and computes
    that of all samples. The capture is unchanged if one of them uses parameters, draws random numbers or has to stay
    with others.
    """
    graph = captured.graph
    names = {operator.name for operator in graph if operator.target != "step" and _mixes(operator)}
    names |= {follower for name in names for follower in nx.descendants(graph.nx, name)}
    found = [graph[name] for name in names]
    if not found or any(each.parameters or each.buffers or each.random or each.cluster for each in found):
        return captured
    moved = (replace(operator, cluster=_CLUSTER) for operator in found)
    return replace(captured, graph=graph.with_operators(moved))


def _mixes(operator: Operator) -> bool:
    return any(spec.mixes_samples for spec in operator.outputs)


def with_others(stages: Sequence[Stage], graph: OperatorGraph, held: Held) -> list[Stage]:
    """The stages, and modules that the plan does not know: in that of the user's step, or in stages of their own on the
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
