"""Modules that no stage of the plan has, because the step that was planned did not call them.

An evaluation may use a module of its own, and a term of the loss may begin after some steps. Their parameters are on
the rank of the user's step, unless they are copies of others, which are where those are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Stage
from lightning_gpp.planning.assignment.assign import owner_of
from lightning_gpp.planning.assignment.modules import around

Held = Mapping[str, Sequence[int]]
"""The devices that hold each parameter and buffer, by name."""
NOWHERE: Final[Held] = MappingProxyType({})


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
