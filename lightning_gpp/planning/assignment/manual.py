"""Stages by hand: the user lists the modules of each stage, and optionally its devices and micro-batch size.

And whether a plan from a file was made for this model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Annotated, Any, Final

from annotated_types import Ge, MinLen

from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import assign, make_plan, owner_of, owners_of, step_owner
from lightning_gpp.planning.assignment.complete import resolve_size
from lightning_gpp.planning.assignment.layout import number_devices
from lightning_gpp.planning.assignment.modules import around, module_tree, stage_names
from lightning_gpp.slices import unsliced
from lightning_gpp.validation import shown, validated
from lightning_gpp.wording import some

StagesSpec = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""One of: module path -> stage number; stage name -> its keys (or its list of modules); a list of stages' keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stage as the user wrote it; None for keys that are left out."""

    modules: Annotated[tuple[str, ...], MinLen(1)]
    name: str | None = None
    devices: tuple[Annotated[int, Ge(0)], ...] | None = None
    micro_batch_size: Annotated[int, Ge(1)] | None = None
    recompute: bool | tuple[str, ...] = False
    offload: bool = False
    round_robin: bool = False
    slack: Annotated[int, Ge(0)] = 0


KEYS: Final = tuple(field.name for field in fields(Entry))


def manual(
    graph: OperatorGraph,
    spec: StagesSpec,
    *,
    batch_size: int,
    num_micro_batches: int | None = None,
    micro_batch_size: int | None = None,
    schedule: str = "1f1b",
    model: str = "",
) -> Plan:
    """The plan for the stages that the user wrote down.

    Args:
        graph: the captured operators.
        spec: `{module path: stage number}`, `{stage name: keys}`, or a list of keys: `name`, `modules`, `devices`,
            `micro_batch_size`, `recompute`, `offload`, `round_robin`, `slack`; all but `modules` may be left out. The
            module "@step" is the user's step; without it the step joins the stage that makes most of what it reads.
        batch_size: samples of the mini-batch of one pipeline replica.
        num_micro_batches: for stages without a `micro_batch_size`, as is the argument `micro_batch_size`; by default
            twice the depth.
        schedule: name written into the plan.
        model: fingerprint written into the plan.

    Raises:
        ConfigError: the stages spec has none of the forms, or micro-batches do not fit the mini-batch.
        PlanError: a module does not exist or is listed twice, a parameter is left without a stage, or stages form a
            cycle.
    """
    entries = _with_step(graph, _checked(graph, read(spec)))
    names = stage_names([entry.modules for entry in entries])
    stages = [
        Stage(
            name=entry.name or name,
            modules=entry.modules,
            devices=entry.devices or (index,),
            micro_batch_size=entry.micro_batch_size or batch_size,
            recompute=entry.recompute,
            offload=entry.offload,
            round_robin=entry.round_robin,
            slack=entry.slack,
        )
        for index, (entry, name) in enumerate(zip(entries, names, strict=True))
    ]
    plan = make_plan(graph, stages, batch_size=batch_size, schedule=schedule, model=model)
    size = resolve_size(batch_size, num_micro_batches, micro_batch_size, 2 * plan.depth)
    given = {entry.modules: entry.micro_batch_size for entry in entries}
    sized = tuple(replace(stage, micro_batch_size=given[stage.modules] or size) for stage in plan.stages)
    plan = _with_devices(replace(plan, stages=sized), entries)
    _check_sizes(plan)
    return plan


def _checked(graph: OperatorGraph, entries: list[Entry]) -> list[Entry]:
    known = [node.path for node in module_tree(graph).walk()]
    for entry in entries:
        for module in entry.modules:
            if module not in known and module != STEP:
                raise _unknown(module, known)
    _check_parameters(graph, owners_of([entry.modules for entry in entries]))
    return entries


def _unknown(module: str, known: Sequence[str]) -> PlanError:
    close = get_close_matches(module, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"Use: {some([STEP, *known[1:]])}."
    return PlanError(
        f"strategy.stages names the module {module!r}, to which no operator of the captured step belongs: the step "
        "does not call it, or it has neither parameters nor buffers, so that what it computes goes to the stage that "
        f"reads it. {hint}"
    )


def _check_parameters(graph: OperatorGraph, owners: dict[str, int]) -> None:
    left = unplaced(graph, owners)
    if left:
        raise _left("stages", left)


def _left(option: str, modules: Sequence[str]) -> PlanError:
    return PlanError(
        f"strategy.{option} leaves parameters without a stage: those of {some(modules)}. Add these modules to a stage."
    )


def unplaced(graph: OperatorGraph, owners: dict[str, int]) -> list[str]:
    """Modules with parameters that no stage gets: neither they, nor a module around them or inside them, is listed.

    Parameters that a module around listed ones uses itself go where they are read, like all its own operators; those
    that the user's step uses go with the step.
    """
    divided = around(owners)
    modules = dict.fromkeys(operator.module for operator in graph if operator.parameters and operator.module != STEP)
    return [name for name in modules if owner_of(name, owners) is None and name not in divided]


def _with_step(graph: OperatorGraph, entries: list[Entry]) -> list[Entry]:
    modules = [entry.modules for entry in entries]
    if not any(STEP in paths for paths in modules):
        owner = step_owner(graph, modules)
        entries = [*entries]
        entries[owner] = replace(entries[owner], modules=(*entries[owner].modules, STEP))
    _check_work(graph, entries)
    return entries


def _check_work(graph: OperatorGraph, entries: Sequence[Entry]) -> None:
    assignment = assign(graph, [entry.modules for entry in entries])
    busy = {stage for stages in assignment.values() for stage in stages}
    for index, entry in enumerate(entries):
        if index not in busy:
            raise PlanError(
                f"Stage {index} of strategy.stages, with the modules {list(entry.modules)}, computes nothing: other "
                "stages list all its submodules. Leave it out."
            )


def _with_devices(plan: Plan, entries: Iterable[Entry]) -> Plan:
    given = [entry.devices is not None for entry in entries]
    if not any(given):
        return number_devices(plan)
    if not all(given):
        raise ConfigError("strategy.stages gives devices to some stages only; give them to all, or to none.")
    step = plan.stages[plan.step_stage]
    if 0 not in step.devices:
        raise PlanError(
            f"Stage {step.name!r} runs the training step and must be on device 0, which loads the data and logs; "
            f"strategy.stages puts it on {list(step.devices)}."
        )
    return plan


def _check_sizes(plan: Plan) -> None:
    for stage in plan.stages:
        if stage.micro_batch_size > plan.batch_size:
            raise ConfigError(
                f"Stage {stage.name!r} of strategy.stages: micro_batch_size={stage.micro_batch_size}, but a mini-batch "
                f"has {plan.batch_size} samples per pipeline."
            )


# -- the forms of the stages spec -------------------------------------------------------------------------------------


def read(spec: StagesSpec) -> list[Entry]:
    """The stages that a user wrote.

    Raises:
        ConfigError: the spec has none of the forms.
    """
    if not spec:
        raise ConfigError(
            "strategy.stages is empty. Give module paths and stage numbers: strategy.stages={encoder: 0, decoder: 1}."
        )
    if not isinstance(spec, Mapping):
        return [_entry(f"strategy.stages[{index}]", keys) for index, keys in enumerate(spec)]
    for path, number in spec.items():
        if type(path) is not str or type(number) is not int:
            raise ConfigError(
                f"strategy.stages has {shown(path)}: {shown(number)}; it must map paths of modules to numbers of "
                "stages: strategy.stages={encoder: 0, decoder: 1}."
            )
    return _numbered(spec)


def _numbered(spec: Mapping[str, int]) -> list[Entry]:
    count = 1 + max(spec.values())
    modules = [tuple(path for path, number in spec.items() if number == stage) for stage in range(count)]
    if not all(modules) or min(spec.values()) < 0:
        raise ConfigError(
            f"strategy.stages numbers the stages {sorted(set(spec.values()))}; it must number them without gaps. Use "
            f"{list(range(len(set(spec.values()))))}."
        )
    return [Entry(modules=paths) for paths in modules]


def _entry(where: str, keys: Any) -> Entry:
    if isinstance(keys, Mapping):
        keys = {key: [value] if key == "modules" and isinstance(value, str) else value for key, value in keys.items()}
    return validated(Entry, keys, error=ConfigError, key=where, remedy=_REMEDY)


_REMEDY: Final = f"A stage has `modules` (paths of modules), and may have {', '.join(KEYS[1:])}."


# -- plans from files -------------------------------------------------------------------------------------------------

REMEDY = "Make a new plan: gpp-plan ... output=plan.yaml."


def check_model(plan: Plan, graph: OperatorGraph, fingerprint: str = "") -> None:
    """Refuse a plan that was made for another model.

    Args:
        plan: the plan.
        graph: the captured model.
        fingerprint: fingerprint of the captured model; compared if the plan has one, too.

    Raises:
        PlanError: naming modules that are missing or new, or the fingerprints.
    """
    plan = unsliced(plan).plan
    known = {node.path for node in module_tree(graph).walk()} | {STEP}
    listed = {module: index for index, stage in enumerate(plan.stages) for module in stage.modules}
    missing = [module for module in listed if module not in known]
    new = unplaced(graph, listed)
    if new and not (missing or plan.model):  # by hand, for this model
        raise _left("plan", new)
    if missing or new:
        raise PlanError(f"The plan (strategy.plan) was made for another model. {_difference(missing, new)} {REMEDY}")
    if plan.model and fingerprint and plan.model != fingerprint:
        raise PlanError(
            f"The plan (strategy.plan) was made for another model: the modules have the same names, but the plan's "
            f"fingerprint is {plan.model!r} and the model's {fingerprint!r}, so sizes or operators differ. {REMEDY}"
        )


def _difference(missing: Sequence[str], new: Sequence[str]) -> str:
    parts = [f"Modules of the plan that the model does not call: {some(missing)}."] if missing else []
    parts += [f"Modules of the model that the plan does not place: {some(new)}."] if new else []
    return " ".join(parts)
