"""Blocks: the parts of a model that are measured, as fine as plans can cut it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from torch import nn

from lightning_gpp.capture import Capture
from lightning_gpp.costs.model import Roofline
from lightning_gpp.errors import CaptureError
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import assign, make_plan
from lightning_gpp.planning.assignment.modules import stage_names
from lightning_gpp.planning.problem.units import find_units
from lightning_gpp.stages import Pipeline, build

ModulePaths = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stage of a plan with one stage per block. `content`: equal for blocks that take as long."""

    stage: int
    name: str
    operators: tuple[str, ...]
    content: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """All blocks of a model, and the pipeline that runs them."""

    plan: Plan
    pipeline: Pipeline
    blocks: tuple[Block, ...]


def find_blocks(capture: Capture, module: nn.Module, seconds: Mapping[str, float]) -> Blocks:
    """Cut the model at module borders, with the user's step separate.

    If the cut goes through a module that cannot be cut, or through tensors of unknown shape, it is made coarser, up to
    the model as one block.

    Args:
        capture: capture of the module's step.
        module: module that the blocks run.
        seconds: seconds of every operator, in any unit: only their shares count.

    Raises:
        CaptureError: the model cannot run, not even as one block.
    """
    *cuts, last = _cuts(capture, seconds)
    for modules in cuts:
        with suppress(CaptureError):
            plan, pipeline = _built(capture, module, modules)
            break
    else:
        plan, pipeline = _built(capture, module, last)
    return Blocks(plan=plan, pipeline=pipeline, blocks=_described(capture, plan))


def _cuts(capture: Capture, seconds: Mapping[str, float]) -> Iterator[list[ModulePaths]]:
    """Cuts of the model, from the finest to no cut."""
    for pieces in (inf, 64, 16, 4, 1):  # a block has at most so small a part of all seconds, if it can be divided
        units = find_units(capture.graph, num_pieces=pieces, seconds=seconds).units
        modules = [tuple(path for path in unit.modules if path != STEP) for unit in units]
        yield [*filter(None, modules), (STEP,)]
    yield [("",), (STEP,)]
    yield [("", STEP)]


def _built(capture: Capture, module: nn.Module, modules: Sequence[ModulePaths]) -> tuple[Plan, Pipeline]:
    stages = [
        Stage(name=name, modules=paths, devices=(index,), micro_batch_size=capture.batch_size)
        for index, (name, paths) in enumerate(zip(stage_names(modules), modules, strict=True))
    ]
    plan = make_plan(capture.graph, stages, batch_size=capture.batch_size)
    return plan, build(capture, plan, module)


def _described(capture: Capture, plan: Plan) -> tuple[Block, ...]:
    assignment = assign(capture.graph, [stage.modules for stage in plan.stages])
    roofline = Roofline(capture.graph)
    blocks = []
    for index, stage in enumerate(plan.stages):
        operators = [operator for operator in capture.graph if index in assignment[operator.name]]
        content = tuple((operator.target, roofline.kind(operator), operator.saved_bytes) for operator in operators)
        names = tuple(operator.name for operator in operators)
        blocks.append(Block(stage=index, name=stage.name, operators=names, content=content))
    return tuple(blocks)
