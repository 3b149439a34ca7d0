"""From a draft to a plan that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.assign import StageDraft, assign, make_plan
from lightning_gpp.planning.assignment.modules import ModuleNode, module_tree, stage_names
from lightning_gpp.planning.problem.draft import Draft, DraftStage, in_topological_order
from lightning_gpp.planning.problem.problem import Problem


def realise(problem: Problem, draft: Draft, model: str = "") -> tuple[Plan, int]:
    """The plan of a draft, and the number of its pipelines.

    A draft whose stages all have r replicas, the j-th of each side by side on the j-th part of the devices, is r
    replicas of a pipeline, if the problem allows it. In any other draft the user's step runs on one device: it becomes
    a stage of its own if its stage has replicas.

    Args:
        problem: what the draft is for.
        draft: the stage of the user's step, the problem's last unit, is on device 0.
        model: fingerprint written into the plan.

    Raises:
        PlanError: the stages form a cycle.
    """
    draft, num_pipelines = in_topological_order(problem, draft), 1
    if problem.replicable:
        draft, num_pipelines = unreplicated(problem, draft)
    modules = [[path for unit in stage.units for path in problem.units.units[unit].modules] for stage in draft.stages]
    paths = compress(problem.graph, modules)
    drafts = [
        StageDraft(
            name=name,
            modules=paths[index],
            devices=stage.devices,
            micro_batch_size=stage.micro_batch_size,
            recompute=stage.recompute and STEP not in paths[index],
        )
        for index, (name, stage) in enumerate(zip(stage_names(paths), draft.stages, strict=True))
    ]
    batch_size = problem.batch_size // num_pipelines
    drafts = list(_with_one_step(drafts))
    plan = make_plan(problem.graph, drafts, batch_size=batch_size, schedule=draft.schedule, model=model)
    return plan.chained() if draft.chained else plan, num_pipelines


def unreplicated(problem: Problem, draft: Draft) -> tuple[Draft, int]:
    """The draft of one pipeline, and the number of pipeline replicas that the given draft consists of."""
    number, width = len(draft.stages[0].devices), len(draft.stages)
    sizes = [problem.batch_size // problem.num_slices, *(stage.micro_batch_size for stage in draft.stages)]
    regular = all(
        stage.devices == tuple(range(stage.devices[0], width * number, width)) and stage.devices[0] < width
        for stage in draft.stages
    )
    if number == 1 or not regular or any(size % number for size in sizes):
        return draft, 1
    return replace(draft, stages=tuple(_first_replica(stage) for stage in draft.stages)), number


def _first_replica(stage: DraftStage) -> DraftStage:
    number = len(stage.devices)
    return replace(stage, devices=stage.devices[:1], micro_batch_size=stage.micro_batch_size // number)


def _with_one_step(drafts: Sequence[StageDraft]) -> Iterator[StageDraft]:
    for draft in drafts:
        rest = tuple(path for path in draft.modules if path != STEP)
        if STEP not in draft.modules or len(draft.devices) == 1:
            yield draft
        else:
            yield replace(draft, modules=rest)
            yield replace(draft, name="step", modules=(STEP,), devices=(min(draft.devices),), recompute=False)


def compress(graph: OperatorGraph, stage_modules: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The same stages by the fewest paths: a module instead of all its submodules where the stage computes it whole."""
    assignment = assign(graph, stage_modules)
    found: list[list[str]] = [[] for _ in stage_modules]
    _collect(module_tree(graph), {name: set(stages) for name, stages in assignment.items()}, found)
    step = next(index for index, modules in enumerate(stage_modules) if STEP in modules)
    found[step].append(STEP)
    return [tuple(paths) for paths in found]


def _collect(node: ModuleNode, assignment: dict[str, set[int]], found: list[list[str]]) -> None:
    stages: set[int] = set().union(*(assignment[operator.name] for operator in node.all_operators()))
    once = all(len(assignment[operator.name]) == 1 for operator in node.all_operators())
    if len(stages) == 1 and once:
        found[stages.pop()].append(node.path)
    else:
        for child in node.children.values():
            _collect(child, assignment, found)
