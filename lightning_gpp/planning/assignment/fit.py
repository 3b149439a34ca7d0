"""Checks that a plan, perhaps from a file, was made for this model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.assign import assign, crossing, owner_of
from lightning_gpp.planning.assignment.modules import around, module_tree
from lightning_gpp.slices import unsliced
from lightning_gpp.wording import some

REMEDY = "Make a new plan with `gpp-plan ... output=plan.yaml`, or remove strategy.plan."


def check_model(plan: Plan, graph: OperatorGraph, fingerprint: str = "") -> None:
    """Refuse a plan that was made for another model.

    Args:
        plan: the plan.
        graph: the captured model.
        fingerprint: fingerprint of the captured model; compared if the plan has one, too.

    Raises:
        PlanError: naming modules that are missing or new, edges that differ, or the fingerprints.
    """
    plan = unsliced(plan).plan
    known = {node.path for node in module_tree(graph).walk()} | {STEP}
    listed = {module: index for index, stage in enumerate(plan.stages) for module in stage.modules}
    missing = [module for module in listed if module not in known]
    new = _unplaced(graph, listed)
    if missing or new:
        raise PlanError(f"The plan (strategy.plan) was made for another model. {_difference(missing, new)} {REMEDY}")
    _check_edges(plan, graph)
    if plan.model and fingerprint and plan.model != fingerprint:
        raise PlanError(
            f"The plan (strategy.plan) was made for another model: the modules have the same names, but the plan's "
            f"fingerprint is {plan.model!r} and the model's {fingerprint!r}, so sizes or operators differ. {REMEDY}"
        )


def _unplaced(graph: OperatorGraph, listed: dict[str, int]) -> list[str]:
    """Modules with parameters that no stage lists and that contain no listed module."""
    divided = around(listed)
    modules = (operator.module for operator in graph if operator.parameters)
    return [name for name in dict.fromkeys(modules) if owner_of(name, listed) is None and name not in divided]


def _difference(missing: Sequence[str], new: Sequence[str]) -> str:
    parts = [f"Modules of the plan that the model does not call: {some(missing)}."] if missing else []
    parts += [f"Modules of the model that the plan does not place: {some(new)}."] if new else []
    return " ".join(parts)


def _check_edges(plan: Plan, graph: OperatorGraph) -> None:
    planned = {(edge.src, edge.dst) for edge in plan.edges if not edge.artificial}
    found = set(crossing(graph, assign(graph, [stage.modules for stage in plan.stages])))
    if planned != found:
        raise PlanError(
            "The plan (strategy.plan) was made for another model: between its stages it has edges "
            f"that the model does not have ({_arrows(plan, planned - found) or 'none'}), or lacks some that it has "
            f"({_arrows(plan, found - planned) or 'none'}). {REMEDY}"
        )


def _arrows(plan: Plan, pairs: Iterable[tuple[int, int]]) -> str:
    names = [*(stage.name for stage in plan.stages), "data"]  # SOURCE is -1, so it names the last entry
    return ", ".join(f"{names[src]} -> {names[dst]}" for src, dst in sorted(pairs))
