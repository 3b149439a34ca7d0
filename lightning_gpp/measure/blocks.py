"""Blocks: the parts of a model that are measured, as fine as plans can cut it, with fingerprints of their content."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture import Capture
from lightning_gpp.capture.isolate import names_of
from lightning_gpp.capture.recording import AffineSize, Recorded, Ref, StateRef
from lightning_gpp.errors import CaptureError
from lightning_gpp.graph import Operator, TensorSpec
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import assign, crossing, make_plan
from lightning_gpp.planning.assignment.modules import stage_names
from lightning_gpp.planning.problem.units import find_units
from lightning_gpp.stages import Pipeline, build

ModulePaths = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stage of a plan with one stage per block. `content`: equal for blocks that compute the same."""

    stage: int
    name: str
    operators: tuple[str, ...]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """All blocks of a model, and the pipeline that runs them."""

    plan: Plan
    pipeline: Pipeline
    blocks: tuple[Block, ...]


def find_blocks(capture: Capture, module: nn.Module, seconds: Mapping[str, float], num_pieces: float) -> Blocks:
    """Cut the model at module borders, with the user's step separate.

    If the cut goes through a module that cannot be cut, or through tensors of unknown shape, it is made coarser, up to
    the model as one block.

    Args:
        capture: capture of the module's step.
        module: module that the blocks run.
        seconds: seconds of every operator, in any unit: only their shares count.
        num_pieces: a block has at most 1 / `num_pieces` of all seconds, unless it cannot be divided.

    Raises:
        CaptureError: the model cannot run, not even as one block.
    """
    *cuts, last = _cuts(capture, seconds, num_pieces)
    for modules in cuts:
        with suppress(CaptureError):
            plan, pipeline = _built(capture, module, modules)
            break
    else:
        plan, pipeline = _built(capture, module, last)
    return Blocks(plan=plan, pipeline=pipeline, blocks=_described(capture, module, plan))


def _cuts(capture: Capture, seconds: Mapping[str, float], num_pieces: float) -> Iterator[list[ModulePaths]]:
    """Cuts of the model, from the finest to no cut."""
    for pieces in (num_pieces, *(limit for limit in (64, 16, 4, 1) if limit < num_pieces)):
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


def _described(capture: Capture, module: nn.Module, plan: Plan) -> tuple[Block, ...]:
    assignment = assign(capture.graph, [stage.modules for stage in plan.stages])
    flows = crossing(capture.graph, assignment)
    content = _BlockContent(capture, module)
    blocks = []
    for index, stage in enumerate(plan.stages):
        operators = [operator for operator in capture.graph if index in assignment[operator.name]]
        sent = dict.fromkeys(value for pair, values in flows.items() if pair[0] == index for value in values)
        blocks.append(
            Block(
                stage=index,
                name=stage.name,
                operators=tuple(operator.name for operator in operators),
                content=content.of(operators, list(sent)),
            )
        )
    return tuple(blocks)


class _BlockContent:
    """Describes operators without the names of modules and the numbers of calls, which differ between equal blocks."""

    def __init__(self, capture: Capture, module: nn.Module) -> None:
        self._capture, self._module = capture, module
        self._states = {name: tensor for tensor, name in names_of(module)}

    def of(self, operators: Sequence[Operator], sent: Sequence[tuple[str, int]]) -> str:
        """The fingerprint of a block with the results `sent`."""
        known: dict[str, str] = {operator.name: str(index) for index, operator in enumerate(operators)}
        lines = [line for operator in operators for line in self._lines(operator, known)]
        lines += [f"sent {self._value(name, output, known)}" for name, output in sent]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]

    def _lines(self, operator: Operator, known: dict[str, str]) -> Iterator[str]:
        yield f"{operator.target} -> {', '.join(map(_spec, operator.outputs))}; {operator.saved_bytes}"
        if operator.target == "step":
            yield _source(type(self._module))
            read = self._capture.network.needed
        else:
            call = self._capture.network.calls[int(operator.name.partition("_")[0])]
            yield f"{self._arguments(call, known)} {call.context}"
            read = call.mutated
        yield " ".join(self._value(_name(ref, self._capture), ref.output, known) for ref in read)

    def _arguments(self, call: Recorded, known: dict[str, str]) -> str:
        leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
        return f"{structure} {' '.join(self._leaf(leaf, known) for leaf in leaves)}"

    def _leaf(self, leaf: Any, known: dict[str, str]) -> str:
        if isinstance(leaf, Ref):
            return self._value(_name(leaf, self._capture), leaf.output, known)
        if isinstance(leaf, StateRef):
            tensor = self._states[leaf.name]
            return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        if isinstance(leaf, AffineSize):
            return str(leaf.value)
        simple = leaf is None or isinstance(leaf, bool | int | float | str | slice | torch.dtype)
        return repr(leaf) if simple else type(leaf).__name__

    def _value(self, name: str, output: int, known: dict[str, str]) -> str:
        """The position of a value's operator in the block; form and order of appearance of a value from outside."""
        outside = name not in known
        number = known.setdefault(name, f"outside {len(known)}")
        return f"{number}.{output}" + (f" {_spec(self._capture.graph[name].outputs[output])}" if outside else "")


def _name(ref: Ref, capture: Capture) -> str:
    from lightning_gpp.capture.captured import name_of

    return name_of(ref.call, capture.network)


def _spec(spec: TensorSpec) -> str:
    return f"[{', '.join(map(str, spec.shape))}] {spec.dtype} {spec.requires_grad}"


def _source(kind: type) -> str:
    """The source of the step's class, which no graph describes; the name of the class if it has no source."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"
