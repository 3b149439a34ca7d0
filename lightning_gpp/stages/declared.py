"""Declared stages: modules and the edges between them, given by the user; they run eagerly, and nothing is captured.

This is for models that cannot be captured. A stage is one module, called with results of other stages and with
arguments of the network's call. Shapes are known only at run time, so edges are dynamic.

    stages:
      - {name: image, modules: [image_tower], inputs: ["@image"]}
      - {name: text, modules: [text_tower], inputs: ["@tokens"]}
      - {name: head, modules: [head], inputs: [image, text]}

"@image" is the argument `image` of the module's forward; `image` is the result of stage `image`, `image.1` or
`image.key` a part of it. `inputs` may also be a mapping, for keyword arguments.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_gpp.capture.batch import GUESSED, BatchDims, batch_size_of
from lightning_gpp.capture.isolate import add_sizes, names_of
from lightning_gpp.capture.record import step_arguments
from lightning_gpp.errors import CaptureError, PlanError
from lightning_gpp.graph import Operator, OperatorGraph, TensorSpec
from lightning_gpp.plan import SOURCE, STEP, Plan
from lightning_gpp.runtime.stage import MicroBatch, Slot
from lightning_gpp.stages.answers import answered
from lightning_gpp.stages.build import Pipeline, build
from lightning_gpp.stages.effects import holders_in, without_effects
from lightning_gpp.stages.step import StepRunner, Stopped

UNKNOWN = TensorSpec(shape=(), dtype="float32", requires_grad=True, dynamic=True)
GIVEN = TensorSpec(shape=(), dtype="float32", requires_grad=False, dynamic=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One declared stage: a module path, and the references of its arguments by position or name."""

    name: str
    module: str
    inputs: tuple[tuple[int | str, str], ...]

    @property
    def references(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(reference for _, reference in self.inputs))


def is_declared(entries: Any) -> bool:
    """True if `strategy.stages` declares edges."""
    listed = isinstance(entries, Sequence) and not isinstance(entries, str)
    return listed and any(isinstance(entry, Mapping) and "inputs" in entry for entry in entries)


@dataclass(frozen=True, slots=True)
class Declared:
    """Replaces a `Capture` if the user declared the stages."""

    graph: OperatorGraph
    declarations: tuple[Declaration, ...]
    step: str
    batch_size: int
    dims: BatchDims

    def called_on(self, module: nn.Module, batch_idx: int = 0) -> tuple[Callable[..., Any], list[int]]:
        """The step, as a function of the samples for this module, and its arguments after these."""
        step = getattr(module, self.step)
        return step, step_arguments(step, batch_idx)

    @property
    def notes(self) -> list[str]:
        """Remarks for people; there are none, because nothing was captured."""
        return []

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self.declarations).encode()).hexdigest()[:16]


@build.register
def _build_declared(declared: Declared, plan: Plan, module: nn.Module) -> Pipeline:
    _check_recompute(plan)
    by_path = {declaration.module: declaration for declaration in declared.declarations}
    ordered = [_declaration_of(stage.modules, by_path) for stage in plan.stages]
    step = DeclaredStep(
        module=module,
        returns_loss=declared.step == "training_step",
        declarations=declared.declarations,
        dims=declared.dims,
    )
    stages = tuple(
        EagerStage(
            declaration, module, step if STEP in stage.modules else None, _sent(declaration, declared.declarations)
        )
        for declaration, stage in zip(ordered, plan.stages, strict=True)
    )
    return Pipeline(
        stages=stages,
        slots=tuple(_slots(plan, ordered, edge.src, edge.dst, edge.artificial) for edge in plan.edges),
        parameters=tuple(_used(module, declaration, declared.graph.parameter_sizes) for declaration in ordered),
        buffers=tuple(_used(module, declaration, declared.graph.buffer_bytes) for declaration in ordered),
        step=step,
        source=step,
    )


def _check_recompute(plan: Plan) -> None:
    names = [stage.name for stage in plan.stages if stage.recomputed_blocks]
    if names:
        raise PlanError(
            f"The stages {names} recompute blocks, but stages of declared edges (`inputs` in strategy.stages) are not "
            "captured, so nothing is known of the modules inside. Write recompute: true, or leave out `inputs`."
        )


def _declaration_of(modules: Sequence[str], by_path: Mapping[str, Declaration]) -> Declaration:
    found = [by_path[module] for module in modules if module in by_path]
    if len(found) != 1:
        raise PlanError(
            f"A stage with modules {list(modules)} does not match strategy.stages: a stage with `inputs` is one "
            f"module, one of {sorted(by_path)}."
        )
    return found[0]


def _slots(plan: Plan, ordered: Sequence[Declaration], src: int, dst: int, artificial: bool) -> tuple[Slot, ...]:
    if artificial:
        return ()
    prefix = "@" if src == SOURCE else ordered[src].name
    return tuple(Slot(r, UNKNOWN) for r in ordered[dst].references if r == prefix or _stage_of(r) == prefix)


def declare(
    module: nn.Module, batch: Any, entries: Sequence[Mapping[str, Any]], *, step: str, dims: BatchDims | None = None
) -> Declared:
    """Check the declared stages and make their graph.

    Raises:
        PlanError: a module does not exist, a reference names no stage, or more than one stage has no successor.
    """
    declarations = tuple(_declaration(module, entry, number) for number, entry in enumerate(entries))
    _check(declarations)
    return Declared(
        _graph(module, declarations), declarations, step, batch_size_of(batch, dims or GUESSED), dims or GUESSED
    )


def _declaration(module: nn.Module, entry: Mapping[str, Any], number: int) -> Declaration:
    modules = [path for path in entry.get("modules", ()) if path != STEP]
    if len(modules) != 1 or not entry.get("inputs"):
        raise PlanError(
            f"strategy.stages[{number}]: a stage of declared edges has exactly one module and its `inputs`, got "
            f"modules {modules} and inputs {entry.get('inputs')}. Put several modules into one nn.Sequential or module."
        )
    try:
        module.get_submodule(modules[0])
    except AttributeError as error:
        known = [name for name, _ in module.named_children()]
        raise PlanError(f"strategy.stages[{number}]: there is no module {modules[0]!r}; outermost: {known}.") from error
    inputs = entry["inputs"]
    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    return Declaration(name=entry.get("name") or modules[0], module=modules[0], inputs=tuple(pairs))


def _check(declarations: Sequence[Declaration]) -> None:
    names = {declaration.name for declaration in declarations}
    for declaration in declarations:
        for reference in declaration.references:
            if _stage_of(reference) not in names | {"@"}:
                raise PlanError(
                    f"strategy.stages: stage {declaration.name!r} reads {reference!r}, but there is no such stage; "
                    f"stages are {sorted(names)}, arguments of the forward are written with @."
                )
    read = {_stage_of(reference) for declaration in declarations for reference in declaration.references}
    sinks = sorted(names - read)
    if len(sinks) != 1:
        raise PlanError(f"strategy.stages: exactly one stage must be read by no other (the network's result): {sinks}.")


def _stage_of(reference: str) -> str:
    return "@" if reference.startswith("@") else reference.partition(".")[0]


def _graph(module: nn.Module, declarations: Sequence[Declaration]) -> OperatorGraph:
    graph = OperatorGraph()
    add_sizes(graph, module)
    for reference in sorted({r for d in declarations for r in d.references if r.startswith("@")}):
        graph.add(Operator(name=reference, target="input", module="@source", outputs=(GIVEN,)))
    for declaration in _ordered(declarations):
        graph.add(
            Operator(
                name=declaration.name,
                target="module",
                module=declaration.module,
                parameters=_used(module, declaration, graph.parameter_sizes),
                buffers=_used(module, declaration, graph.buffer_bytes),
                outputs=(UNKNOWN,),
            )
        )
        for reference in declaration.references:
            source = _stage_of(reference)
            graph.connect(reference if source == "@" else source, declaration.name, 0)
    graph.add(Operator(name="step", target="step", module=STEP))
    graph.connect(_ordered(declarations)[-1].name, "step", 0)
    return graph


def _ordered(declarations: Sequence[Declaration]) -> list[Declaration]:
    """The declarations in an order in which each comes after those that it reads.

    Raises:
        PlanError: there is a cycle.
    """
    done: list[Declaration] = []
    rest = list(declarations)
    while rest:
        names = {declaration.name for declaration in done} | {"@"}
        ready = [d for d in rest if all(_stage_of(reference) in names for reference in d.references)]
        if not ready:
            raise PlanError(f"strategy.stages: these stages form a cycle: {[d.name for d in rest]}.")
        done.append(ready[0])
        rest.remove(ready[0])
    return done


def _used(module: nn.Module, declaration: Declaration, names: Mapping[str, int]) -> tuple[str, ...]:
    """Canonical names of the tensors of a stage's module."""
    own = {id(tensor) for tensor, _ in names_of(module.get_submodule(declaration.module))}
    return tuple(name for tensor, name in names_of(module) if id(tensor) in own and name in names)


def _sent(declaration: Declaration, declarations: Sequence[Declaration]) -> tuple[str, ...]:
    references = (reference for other in declarations for reference in other.references)
    return tuple(dict.fromkeys(r for r in references if _stage_of(r) == declaration.name))


@dataclass(slots=True)
class EagerStage:
    """Calls one module of the user. `sent`: the parts of its result that other stages read."""

    declaration: Declaration
    root: nn.Module
    step: DeclaredStep | None
    sent: tuple[str, ...]
    uses_random: bool = True

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The module and all its submodules."""
        return tuple(self.root.get_submodule(self.declaration.module).modules())

    def forward(self, values: Mapping[str, torch.Tensor], micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        arguments = {key: values[reference] for key, reference in self.declaration.inputs}
        positional = [value for key, value in arguments.items() if isinstance(key, int)]
        named = {key: value for key, value in arguments.items() if isinstance(key, str)}
        result = self.root.get_submodule(self.declaration.module)(*positional, **named)
        outputs = {reference: _part(result, reference, self.declaration.name) for reference in self.sent}
        return outputs if self.step is None else {**outputs, **self.step.run(micro_batch, result)}


def _part(result: Any, reference: str, name: str) -> torch.Tensor:
    _, _, key = reference.partition(".")
    part = _item(result, key) if key else result
    if not isinstance(part, torch.Tensor):
        raise CaptureError(
            f"Stage {name!r} gives {_described(result)}, in which {reference!r} is not a tensor. Name a part of the "
            f"result, as in '{name}.0' or '{name}.key' (strategy.stages, `inputs`)."
        )
    return part


def _described(result: Any) -> str:
    kind = type(result).__name__
    if isinstance(result, Mapping):
        return f"a {kind} with the keys {', '.join(map(str, result))}"
    return f"a {kind} of {len(result)} items" if isinstance(result, list | tuple) else f"a {kind}"


def _item(result: Any, key: str) -> Any:
    """A part of a stage's result by position, key or attribute; None if it does not exist."""
    if isinstance(result, Mapping):
        return result.get(key)
    if key.isdigit() and isinstance(result, Sequence):
        return result[int(key)] if int(key) < len(result) else None
    return getattr(result, key, None)


@dataclass(kw_only=True)
class DeclaredStep(StepRunner):
    """The user's step around declared stages: its outermost call of the network returns the last stage's result."""

    declarations: tuple[Declaration, ...]

    def inputs(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}

        def answer(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found.update(self._arguments(module, args, kwargs))
            raise Stopped

        self.start_streams(micro_batch)
        with (
            without_effects([self.module], (), holders_in([self.module])),
            answered(self._networks(), answer),
            torch.no_grad(),
        ):
            try:
                self.call(micro_batch)
            except Stopped:
                return found
        raise CaptureError("The step did not call the module whose stages are declared (strategy.stages).")

    def run(self, micro_batch: MicroBatch, result: Any) -> dict[str, torch.Tensor]:
        """Run the step; its call of the network returns `result`."""
        self.start_streams(micro_batch)
        with answered(self._networks(), lambda *_: result):
            return self.finish(micro_batch, self.call(micro_batch))

    def _networks(self) -> dict[str, nn.Module]:
        """Candidates for the network: the module itself, and the innermost one that contains all stages."""
        parts = [declaration.module.split(".")[:-1] for declaration in self.declarations]
        common = [level[0] for level in zip(*parts, strict=False) if len(set(level)) == 1]
        paths = {"", ".".join(common)}
        return {path: self.module.get_submodule(path) for path in paths}

    def _arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        flat = {**bound, **bound.pop("kwargs", {})} if isinstance(bound.get("kwargs"), dict) else bound
        wanted = {r for declaration in self.declarations for r in declaration.references if r.startswith("@")}
        wrong = sorted(r for r in wanted if not isinstance(flat.get(r[1:]), torch.Tensor))
        if wrong:
            raise CaptureError(
                f"strategy.stages reads {wrong}, but the step calls the module with {sorted(flat)}; every @name must "
                "be a tensor argument of its forward."
            )
        return {reference: flat[reference[1:]] for reference in wanted}
