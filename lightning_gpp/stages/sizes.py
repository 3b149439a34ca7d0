"""The numbers of a pipeline that depend on the sizes of its mini-batches, such as the length of their sequences.

They are the literals in the source of its stages, the whole numbers that the user's step passes to modules and gets
from them, and the shapes of tensors that cross borders. Pipelines of two lengths that differ in these alone do the
same; one of a third length is the first with other numbers.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Container, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from types import CodeType, FunctionType
from typing import Any, Final

import torch

from lightning_gpp.capture.recording import Ref
from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.runtime.stage import Slot, StageModule
from lightning_gpp.stages.build import Pipeline
from lightning_gpp.stages.code import Shaped, compiled
from lightning_gpp.stages.step import CapturedStage
from lightning_gpp.stages.user_step import UserStep, is_frozen

_NAME: Final = "_size_{}"

Change = Callable[[float], float]
"""Another number for a number."""
_Source = tuple[str, dict[int, int]]
"""All of a source besides its whole numbers, and the numbers that change, by their places among these."""


def may_be_resized(pipeline: Pipeline) -> bool:
    """True if all numbers of a pipeline are known."""
    return isinstance(pipeline.step, UserStep) and all(type(stage) is CapturedStage for stage in pipeline.stages)


def numbers_of(pipeline: Pipeline) -> list[float]:
    """The numbers, in the order in which `resized` takes them."""
    found: list[float] = []

    def note(number: float) -> float:
        found.append(number)
        return number

    _Numbered.of(pipeline, note)
    return found


def are_alike(one: Pipeline, other: Pipeline) -> bool:
    """True if two pipelines of one module and plan differ in their numbers alone."""
    here, there = (_Numbered.of(pipeline, lambda _: -1) for pipeline in (one, other))  # no source has a -1
    step, others = _step(one), _step(other)
    pairs = zip(chain(*here.values), chain(*there.values), strict=False)
    return (
        (here.slots, here.specs, here.sources, here.shaped) == (there.slots, there.specs, there.sources, there.shaped)
        and (one.parameters, one.buffers) == (other.parameters, other.buffers)
        and (step.input_keys, step.network.needed) == (others.input_keys, others.network.needed)
        and [*map(len, here.values)] == [*map(len, there.values)]
        and all(_same(*pair) or _are_objects(*pair) for pair in pairs)
        and all(map(_same_constants, _stages(one), _stages(other)))
    )


def resized(pipeline: Pipeline, numbers: Iterable[float]) -> Pipeline:
    """The pipeline with other numbers; it shares all else with the first."""
    new = iter(numbers)
    made = _Numbered.of(pipeline, lambda _: next(new))
    step = _resized_step(_step(pipeline), made)
    parts = zip(_stages(pipeline), made.sources, made.shaped, strict=True)
    stages: tuple[StageModule, ...] = tuple(
        _resized_stage(stage, step, source, shaped) for stage, source, shaped in parts
    )
    return replace(pipeline, slots=made.slots, step=step, source=step, stages=stages)


@dataclass(frozen=True, slots=True)
class _Numbered:
    """The parts of a pipeline that have numbers.

    `slots`: the tensors of each edge. `specs`: what the step passes to modules and gets from them. `values`: what these
    calls have besides tensors, where something compares it with the capture. `sources`, `shaped`: of each stage.
    """

    slots: tuple[tuple[Slot, ...], ...]
    specs: Mapping[str | Ref, TensorSpec]
    values: list[list[Any]]
    sources: list[_Source]
    shaped: list[dict[str, TensorSpec]]

    @classmethod
    def of(cls, pipeline: Pipeline, change: Change) -> _Numbered:
        """These parts with other numbers."""

        def spec(known: TensorSpec) -> TensorSpec:
            return replace(known, shape=tuple(Affine(change(s.per_sample), change(s.fixed)) for s in known.shape))

        stages = _stages(pipeline)
        return cls(
            slots=tuple(tuple(replace(slot, spec=spec(slot.spec)) for slot in row) for row in pipeline.slots),
            specs={key: spec(known) for key, known in _specs_of_step(_step(pipeline)).items()},
            values=[[change(each) if type(each) is int else each for each in row] for row in _values(_step(pipeline))],
            sources=[_changed(stage.source, change) for stage in stages],
            shaped=[{name: spec(each.spec) for name, each in _shaped(stage).items()} for stage in stages],
        )


def _changed(source: str, change: Change) -> _Source:
    rest, numbers = _parted(source)
    changed = {place: int(change(number)) for place, number in enumerate(numbers)}
    return rest, {place: number for place, number in changed.items() if number != numbers[place]}


@functools.lru_cache(maxsize=256)
def _parted(source: str) -> tuple[str, tuple[int, ...]]:
    """A source with names for its whole numbers, and these."""
    tree, named = ast.parse(source), _Named()
    return ast.unparse(named.visit(tree)), tuple(named.numbers)


@functools.lru_cache(maxsize=64)
def _template(source: str, places: tuple[int, ...]) -> CodeType:
    """The code of a source for all sizes, with names for the numbers that depend on them."""
    return compiled(ast.fix_missing_locations(_Named(frozenset(places)).visit(ast.parse(source))), {}).__code__


class _Named(ast.NodeTransformer):
    """Puts names in the place of whole numbers: of all, or of those at some places."""

    def __init__(self, places: Container[int] | None = None) -> None:
        self.places, self.numbers = places, list[int]()

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if type(node.value) is not int:
            return node
        place = len(self.numbers)
        self.numbers.append(node.value)
        return ast.Name(_NAME.format(place), ast.Load()) if self.places is None or place in self.places else node


def _step(pipeline: Pipeline) -> UserStep:
    assert isinstance(pipeline.step, UserStep)
    return pipeline.step


def _stages(pipeline: Pipeline) -> list[CapturedStage]:
    return [stage for stage in pipeline.stages if isinstance(stage, CapturedStage)]


def _specs_of_step(step: UserStep) -> Mapping[str | Ref, TensorSpec]:
    leaves = chain.from_iterable(leaves for leaves, _ in step.results.values())
    results = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Ref) and leaf.call >= 0)
    known: dict[str | Ref, TensorSpec] = {ref: step.spec_of(ref) for ref in results}
    return known | step.input_specs


def _values(step: UserStep) -> list[list[Any]]:
    arguments = [[each if is_frozen(each) else ... for each in values] for values in step.arguments.values()]
    return arguments + [leaves for leaves, _ in step.results.values()]


def _shaped(stage: CapturedStage) -> dict[str, Shaped]:
    return {name: value for name, value in stage.code.__globals__.items() if isinstance(value, Shaped)}


def _resized_step(step: UserStep, made: _Numbered) -> UserStep:
    inputs = {name: made.specs[name] for name in step.input_specs}
    specs = list(map(list, step.specs))
    for ref, spec in made.specs.items():
        if isinstance(ref, Ref):
            specs[ref.call][ref.output] = spec
    given, results = made.values[: len(step.arguments)], made.values[len(step.arguments) :]
    arguments = {
        key: [old if new is ... else new for old, new in zip(values, row, strict=True)]
        for (key, values), row in zip(step.arguments.items(), given, strict=True)
    }
    answers = {key: (row, form) for (key, (_, form)), row in zip(step.results.items(), results, strict=True)}
    return step.resized(specs, inputs, arguments, answers)


def _resized_stage(stage: CapturedStage, step: UserStep, source: _Source, shaped: Mapping[str, TensorSpec]) -> Any:
    other, (_, numbers) = copy(stage), source
    other.step = None if stage.step is None else step
    if numbers or shaped:
        made = {name: Shaped(spec) for name, spec in shaped.items()}
        named = {_NAME.format(place): number for place, number in numbers.items()}
        function = _template(stage.source, tuple(numbers))
        other.code = FunctionType(function, {**stage.code.__globals__, **made, **named})
    return other


def _are_objects(one: Any, other: Any) -> bool:
    """True for objects of one kind that nothing compares, such as caches that a module returns beside its tensors."""
    return type(one) is type(other) and not any("__eq__" in vars(kind) for kind in type(one).__mro__[:-1])


def _same_constants(one: CapturedStage, other: CapturedStage) -> bool:
    here, there = one.code.__globals__, other.code.__globals__
    constants = ((name, value) for name, value in here.items() if name != "__builtins__")
    return here.keys() == there.keys() and all(
        isinstance(value, Shaped) or _same(value, there[name]) for name, value in constants
    )


def _same(one: Any, other: Any) -> bool:
    """True for the same constant, and for functions that are made of the same parts."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):
        parts = zip((one.func, *one.args), (other.func, *other.args), strict=False)
        return len(one.args) == len(other.args) and one.keywords == other.keywords and all(_same(*p) for p in parts)
    if isinstance(one, torch.Tensor):
        return not one.is_meta and not other.is_meta and torch.equal(one, other)
    try:
        return bool(one == other)
    except Exception:  # an object's __eq__ may raise anything
        return False
