"""The numbers of a pipeline that depend on the sizes of its mini-batches, such as the length of their sequences.

They are the literals in the source of its stages, the whole numbers that the user's step passes to modules and gets
from them, and the shapes of tensors that cross borders. Pipelines of two lengths that differ in these alone do the
same; one of a third length is the first with other numbers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import torch

from lightning_gpp.capture.recording import Ref
from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.runtime.stage import Slot, StageModule
from lightning_gpp.stages.build import CapturedStage, Pipeline
from lightning_gpp.stages.code import Shaped, compiled
from lightning_gpp.stages.user_step import UserStep, is_frozen

_LITERAL: Final = re.compile(r"(?<![\w.'\"])\d+(?![\w.'\"])")
"""A whole number in the source of a stage; those in names and texts are none."""


def may_be_resized(pipeline: Pipeline) -> bool:
    """True if all numbers of a pipeline are known."""
    return isinstance(pipeline.step, UserStep) and all(type(stage) is CapturedStage for stage in pipeline.stages)


def numbers_of(pipeline: Pipeline) -> list[float]:
    """The numbers, in the order in which `resized` takes them."""
    return list(chain(_of_slots(pipeline.slots), _of_step(_step(pipeline)), *map(_of_stage, _stages(pipeline))))


def are_alike(one: Pipeline, other: Pipeline) -> bool:
    """True if two pipelines of one module and plan differ in their numbers alone."""
    return (
        _forms_of_slots(one.slots) == _forms_of_slots(other.slots)
        and _steps_alike(_step(one), _step(other))
        and one.parameters == other.parameters
        and one.buffers == other.buffers
        and all(map(_stages_alike, _stages(one), _stages(other)))
    )


def resized(pipeline: Pipeline, numbers: Iterable[float]) -> Pipeline:
    """The pipeline with other numbers; it shares all else with the first."""
    new = iter(numbers)
    slots = tuple(tuple(replace(slot, spec=_with(slot.spec, new)) for slot in row) for row in pipeline.slots)
    step = _resized_step(_step(pipeline), new)
    stages: tuple[StageModule, ...] = tuple(_resized_stage(stage, step, new) for stage in _stages(pipeline))
    return replace(pipeline, slots=slots, step=step, source=step, stages=stages)


def _step(pipeline: Pipeline) -> UserStep:
    assert isinstance(pipeline.step, UserStep)
    return pipeline.step


def _stages(pipeline: Pipeline) -> list[CapturedStage]:
    return [stage for stage in pipeline.stages if isinstance(stage, CapturedStage)]


# --- shapes


def _of_spec(spec: TensorSpec) -> Iterator[float]:
    for size in spec.shape:
        yield from (size.per_sample, size.fixed)


def _with(spec: TensorSpec, numbers: Iterator[float]) -> TensorSpec:
    return replace(spec, shape=tuple(Affine(next(numbers), next(numbers)) for _ in spec.shape))


def _form(spec: TensorSpec) -> tuple[object, ...]:
    return len(spec.shape), spec.dtype, spec.requires_grad, spec.mixes_samples


def _of_slots(slots: Iterable[Iterable[Slot]]) -> Iterator[float]:
    return chain.from_iterable(_of_spec(slot.spec) for row in slots for slot in row)


def _forms_of_slots(slots: Iterable[Iterable[Slot]]) -> list[list[object]]:
    return [[(slot.name, _form(slot.spec)) for slot in row] for row in slots]


# --- the user's step


def _of_step(step: UserStep) -> Iterator[float]:
    for spec in _specs_of_step(step).values():
        yield from _of_spec(spec)
    for values in _values_of_step(step):
        yield from (value for value in values if _is_number(value))


def _specs_of_step(step: UserStep) -> Mapping[str | Ref, TensorSpec]:
    leaves = chain.from_iterable(leaves for leaves, _ in step.results.values())
    results = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Ref) and leaf.call >= 0)
    known: dict[str | Ref, TensorSpec] = {ref: step.spec_of(ref) for ref in results}
    return known | step.input_specs


def _values_of_step(step: UserStep) -> Iterator[list[Any]]:
    """The values that modules get, where the step compares them with the capture, and those that they return."""
    yield from ([value if is_frozen(value) else ... for value in values] for values in step.arguments.values())
    yield from (leaves for leaves, _ in step.results.values())


def _steps_alike(one: UserStep, other: UserStep) -> bool:
    here, there = _specs_of_step(one), _specs_of_step(other)
    pairs = zip(chain(*_values_of_step(one)), chain(*_values_of_step(other)), strict=False)
    return (
        [*map(_form, here.values())] == [*map(_form, there.values())]
        and here.keys() == there.keys()
        and one.input_keys == other.input_keys
        and one.network.needed == other.network.needed
        and [*map(len, _values_of_step(one))] == [*map(len, _values_of_step(other))]
        and all(_is_number(a) and _is_number(b) or _same(a, b) or _are_objects(a, b) for a, b in pairs)
    )


def _are_objects(one: Any, other: Any) -> bool:
    """True for objects of one kind that nothing compares, such as caches that a module returns beside its tensors."""
    return type(one) is type(other) and not any("__eq__" in vars(kind) for kind in type(one).__mro__[:-1])


def _resized_step(step: UserStep, numbers: Iterator[float]) -> UserStep:
    known = {key: _with(spec, numbers) for key, spec in _specs_of_step(step).items()}
    inputs = {name: known[name] for name in step.input_specs}
    specs = list(map(list, step.specs))
    for ref, spec in known.items():
        if isinstance(ref, Ref):
            specs[ref.call][ref.output] = spec
    arguments = {key: _filled(values, numbers) for key, values in step.arguments.items()}
    results = {key: (_filled(leaves, numbers), structure) for key, (leaves, structure) in step.results.items()}
    return step.resized(specs, inputs, arguments, results)


def _filled(values: list[Any], numbers: Iterator[float]) -> list[Any]:
    return [next(numbers) if _is_number(value) else value for value in values]


def _is_number(value: Any) -> bool:
    return type(value) is int


# --- stages


def _of_stage(stage: CapturedStage) -> Iterator[float]:
    yield from map(int, _LITERAL.findall(stage.source))
    for made in _shaped(stage).values():
        yield from _of_spec(made.spec)


def _written(literal: str, number: int) -> str:
    """A literal for a number; the same text for the same number, because it may stand in a text."""
    return literal if int(literal) == number else str(number)


def _shaped(stage: CapturedStage) -> dict[str, Shaped]:
    return {name: value for name, value in stage.code.__globals__.items() if isinstance(value, Shaped)}


def _stages_alike(one: CapturedStage, other: CapturedStage) -> bool:
    here, there = one.code.__globals__, other.code.__globals__
    return (
        _LITERAL.sub("#", one.source) == _LITERAL.sub("#", other.source)
        and here.keys() == there.keys()
        and all(_same(value, there[name]) for name, value in here.items() if name != "__builtins__")
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
    if isinstance(one, Shaped):
        return _form(one.spec) == _form(other.spec)
    if isinstance(one, torch.Tensor):
        return not one.is_meta and not other.is_meta and torch.equal(one, other)
    try:
        return bool(one == other)
    except Exception:  # an object's __eq__ may raise anything
        return False


def _resized_stage(stage: CapturedStage, step: UserStep, numbers: Iterator[float]) -> CapturedStage:
    source = _LITERAL.sub(lambda found: _written(found[0], int(next(numbers))), stage.source)
    made = {name: Shaped(_with(each.spec, numbers)) for name, each in _shaped(stage).items()}
    other = copy(stage)
    other.step = None if stage.step is None else step
    if source != stage.source or made:
        other.source, other.code = source, compiled(source, {**stage.code.__globals__, **made})
    return other
