"""Tensors that forwards make in modules during a run, such as tables of positions that the first forward fills in.

They belong to the ranks that run their modules; other ranks have them as they were at set-up, or not at all. So each
capture of the run sees them as they were at set-up: then all ranks record the same calls. At the next set-up, all ranks
have the buffers among them, which belong to the state of a module. What forwards put into plain attributes is theirs:
captures see an attribute empty as long as it is on any rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import buffers_of, transient_buffers_of
from lightning_gpp.capture import Capture
from lightning_gpp.capture.made_tensors import filled_attributes, full_name, numbers_of
from lightning_gpp.training.control import Control
from lightning_gpp.training.parameters import Placement


@dataclass(frozen=True, slots=True)
class BufferForm:
    """A buffer as it is known without its values; `present`: whether the rank has these."""

    shape: torch.Size
    dtype: torch.dtype
    persistent: bool
    present: bool

    def empty(self) -> Tensor:
        """A tensor of this form without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def fits(self, other: BufferForm | None) -> bool:
        """True if the other form has the same shape and dtype."""
        return other is not None and (self.shape, self.dtype) == (other.shape, other.dtype)


Forms = Mapping[str, BufferForm | None]
"""Forms of buffers by their names; None for those that are registered as None."""
_UNKNOWN: Final = object()


class MadeTensors:
    """The buffers and attributes that captures of a run found to be made by forwards, or by the step."""

    def __init__(self) -> None:
        self._buffers, self._attributes = MadeBuffers(), FilledAttributes()

    def begin(self, module: nn.Module, control: Control) -> None:
        """Begin a run; all ranks call this together, before the first capture."""
        self._buffers.begin(module, control)
        self._attributes.begin(module, control)

    def note(self, captured: Any) -> None:
        """Note what a captured step makes."""
        if isinstance(captured, Capture):
            self._buffers.names |= captured.network.recording.made_buffers
            self._attributes.names |= captured.network.recording.filled_attributes

    @contextmanager
    def as_at_set_up(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module has what is made as it was at set-up."""
        with self._buffers.as_at_set_up(module), self._attributes.empty(module):
            yield


class FilledAttributes:
    """Attributes that had no tensor before forwards ran, and the numbers that forwards set together with tensors.

    Attributes:
        names: their names.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._first: dict[str, Any] = {}

    def begin(self, module: nn.Module, control: Control) -> None:
        """Find the attributes that an earlier run has filled on some ranks; all ranks call this together.

        They begin as they are on a rank where they are empty.
        """
        self._first = _numbers(module)
        filled = control.gather_all(_filled(module)) if control.num_processes > 1 else [set[str]()]
        self.names = set.union(*filled) - set.intersection(*filled)
        if self.names:
            around = {_split(name)[0] for name in self.names}
            ranks = control.gather_all({name: each for name, each in self._first.items() if _split(name)[0] in around})
            for name in sorted(self.names):
                self._begin_as(ranks[next(rank for rank, names in enumerate(filled) if name not in names)], name)

    def _begin_as(self, numbers: Mapping[str, Any], name: str) -> None:
        """Begin with the numbers of a rank on which this attribute is empty, in the module that has it."""
        self._first.pop(name, None)
        beside = {each: value for each, value in numbers.items() if _split(each)[0] == _split(name)[0]}
        self._first |= beside
        self.names |= {each for each in beside if each != name}

    @contextmanager
    def empty(self, module: nn.Module) -> Iterator[None]:
        """Inside, these attributes are as they began; those that did not exist do not."""
        kept = {name: _attributes_around(module, name).get(_split(name)[1], _UNKNOWN) for name in sorted(self.names)}
        for name in kept:
            _set(module, name, self._first.get(name, _UNKNOWN))
        try:
            yield
        finally:
            for name, value in kept.items():
                _set(module, name, value)


def _numbers(module: nn.Module) -> dict[str, Any]:
    numbers = ((path, numbers_of(part)) for path, part in module.named_modules())
    return {full_name(path, name): value for path, found in numbers for name, value in found.items()}


def _filled(module: nn.Module) -> set[str]:
    return {full_name(path, name) for path, part in module.named_modules() for name in filled_attributes(part)}


def _attributes_around(module: nn.Module, name: str) -> dict[str, Any]:
    return vars(module.get_submodule(_split(name)[0]))


def _set(module: nn.Module, name: str, value: Any) -> None:
    attributes, own = _attributes_around(module, name), _split(name)[1]
    attributes.pop(own, None)
    if value is not _UNKNOWN:
        attributes[own] = value


class MadeBuffers:
    """Buffers that are made or replaced by forwards, or by the step.

    Attributes:
        names: their names.
    """

    def __init__(self) -> None:
        self._first: Forms = {}
        self.names: set[str] = set()

    def begin(self, module: nn.Module, control: Control) -> None:
        """Give all ranks the buffers that an earlier run has made on some, yet without values; all call it together.

        The buffers of the module are then those that captures of the run begin with.
        """
        known = _forms(module), _numbers(module)
        for forms, numbers in control.gather_all(known) if control.num_processes > 1 else ():
            _add_missing(module, forms, numbers)
        self._first, self.names = _forms(module), set()

    @contextmanager
    def as_at_set_up(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module has these buffers as they were at set-up, without values where they are others now."""
        now = _forms(module)
        changed = [name for name in sorted(self.names) if _differ(now.get(name, _UNKNOWN), self._before(name))]
        tables = {path: buffers_of(module.get_submodule(path)) for path in {_split(name)[0] for name in changed}}
        kept = {path: dict(table) for path, table in tables.items()}
        for path, name in map(_split, changed):
            _put(tables[path], name, self._before(full_name(path, name)))
        try:
            yield
        finally:
            for path, table in tables.items():
                table.clear()
                table.update(kept[path])

    def _before(self, name: str) -> Any:
        return self._first.get(name, _UNKNOWN)


def _split(name: str) -> tuple[str, str]:
    path, _, own = name.rpartition(".")
    return path, own


def _forms(module: nn.Module) -> dict[str, BufferForm | None]:
    found: dict[str, BufferForm | None] = {}
    for path, part in module.named_modules():
        transient = transient_buffers_of(part)
        for name, buffer in buffers_of(part).items():
            form = None
            if buffer is not None:
                form = BufferForm(buffer.shape, buffer.dtype, name not in transient, not buffer.is_meta)
            found[full_name(path, name)] = form
    return found


def _differ(now: Any, before: Any) -> bool:
    return now is not before and not (
        isinstance(now, BufferForm) and isinstance(before, BufferForm) and now.fits(before)
    )


def _put(table: dict[str, Any], name: str, before: Any) -> None:
    if before is _UNKNOWN:
        table.pop(name, None)
    else:
        table[name] = None if before is None else before.empty()


def _add_missing(module: nn.Module, forms: Forms, numbers: Mapping[str, Any]) -> None:
    """Register the buffers of another rank that this one lacks, or has in another form and without values.

    The numbers of their modules go with them.
    """
    own, parts = _forms(module), dict(module.named_modules())
    for name, form in forms.items():
        mine, (path, last) = own.get(name), _split(name)
        lacking = mine is None or not (mine.present or mine.fits(form))
        if form is not None and form.present and lacking and path in parts:
            parts[path].register_buffer(last, form.empty(), persistent=form.persistent)
            beside = {_split(each)[1]: value for each, value in numbers.items() if _split(each)[0] == path}
            attributes: dict[str, Any] = vars(parts[path])  # type: ignore[assignment]
            attributes.update(beside)


def made_states(module: nn.Module, state: Mapping[str, Any], placement: Placement) -> dict[str, Tensor]:
    """The entries of the module's state dict that are buffers which forwards have made since parameters were placed."""
    names = {name for name, buffer in module.named_buffers() if name not in placement.devices and not buffer.is_meta}
    return {name: state[name].detach() for name in names & state.keys()}
