"""Buffers that forwards make in modules during a run, such as tables of positions that the first forward fills in.

They belong to the ranks that run their modules; other ranks have them as they were at set-up, or not at all. So each
capture of the run sees them as they were at set-up: then all ranks record the same calls. At the next set-up, all ranks
have them. Tensors in plain attributes need nothing: a module that reads what it has put there is never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import buffers_of, transient_buffers_of
from lightning_gpp.capture import Capture
from lightning_gpp.capture.attributes import dotted
from lightning_gpp.capture.made_tensors import scalars_of
from lightning_gpp.training.control import Control
from lightning_gpp.training.tensors.parameters import Placement


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


def _attribute(module: nn.Module, name: str) -> Any:
    path, own = _split(name)
    return vars(module.get_submodule(path)).get(own, _UNKNOWN)


def _set(module: nn.Module, name: str, value: Any) -> None:
    path, own = _split(name)
    attributes = vars(module.get_submodule(path))
    attributes.pop(own, None)
    if value is not _UNKNOWN:
        attributes[own] = value


def _scalars(module: nn.Module, paths: Set[str] | None = None) -> dict[str, Any]:
    """The scalars in attributes of modules, or of those at these paths, by name."""
    parts = ((path, part) for path, part in module.named_modules() if paths is None or path in paths)
    return {dotted((path, name)): value for path, part in parts for name, value in scalars_of(part).items()}


def _beside(name: str, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of the module that has a tensor of this name."""
    return {each: value for each, value in scalars.items() if _split(each)[0] == _split(name)[0]}


class MadeBuffers:
    """The buffers that captures of a run found to be made or replaced by forwards, or by the step."""

    def __init__(self) -> None:
        self._first: Forms = {}
        self._names: set[str] = set()
        self._first_attributes: dict[str, Any] = {}
        self._attributes: set[str] = set()

    def begin(self, module: nn.Module, control: Control) -> None:
        """Begin a run; all ranks call this together, before the first capture.

        This rank gets the buffers that an earlier run has made on others, yet without values. The buffers of the module
        are then those that captures of the run begin with.
        """
        forms: list[Forms] = [] if control.num_processes == 1 else control.gather_all(_forms(module))
        lacking = {name: (rank, form) for name, (rank, form) in _present(forms).items() if _lacked(name, form, forms)}
        scalars = control.gather_all(_scalars(module, {_split(name)[0] for name in lacking})) if lacking else []
        own = _forms(module)
        for name, (rank, form) in lacking.items():
            if _lacks(own.get(name), form):
                _register(module, name, form, _beside(name, scalars[rank]))
        self._first, self._names = _forms(module), set()
        self._first_attributes, self._attributes = _scalars(module), set()

    def note(self, captured: Any) -> None:
        """Note what a captured step makes."""
        if isinstance(captured, Capture):
            self._names |= captured.network.recording.made_buffers
            self._attributes |= captured.network.recording.made_attributes

    @contextmanager
    def as_at_set_up(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module has these buffers as they were at set-up, without values where they are others now.

        And so it has the attributes that forwards set together with them.
        """
        now = _forms(module)
        changed = [name for name in sorted(self._names) if _differ(now.get(name, _UNKNOWN), self._before(name))]
        tables = {path: buffers_of(module.get_submodule(path)) for path in {_split(name)[0] for name in changed}}
        kept = {path: dict(table) for path, table in tables.items()}
        for path, name in map(_split, changed):
            _put(tables[path], name, self._before(dotted((path, name))))
        set_since = {name: _attribute(module, name) for name in sorted(self._attributes)}
        for name in set_since:
            _set(module, name, self._first_attributes.get(name, _UNKNOWN))
        try:
            yield
        finally:
            for path, table in tables.items():
                table.clear()
                table.update(kept[path])
            for name, value in set_since.items():
                _set(module, name, value)

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
            found[dotted((path, name))] = form
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


def _present(forms: Sequence[Forms]) -> dict[str, tuple[int, BufferForm]]:
    """The buffers of all ranks, each in the form of the last rank that has its values."""
    known = ((name, rank, form) for rank, own in enumerate(forms) for name, form in own.items())
    return {name: (rank, form) for name, rank, form in known if form is not None and form.present}


def _lacked(name: str, form: BufferForm, forms: Sequence[Forms]) -> bool:
    return any(_lacks(own.get(name), form) for own in forms)


def _lacks(mine: BufferForm | None, form: BufferForm) -> bool:
    """True for a rank that does not have a buffer, or has it in another form and without values."""
    return mine is None or not (mine.present or mine.fits(form))


def _register(module: nn.Module, name: str, form: BufferForm, beside: Mapping[str, Any]) -> None:
    """Register a buffer of another rank, with the scalars that its module has there."""
    path, last = _split(name)
    part = module.get_submodule(path)
    part.register_buffer(last, form.empty(), persistent=form.persistent)
    attributes: dict[str, Any] = vars(part)
    attributes.update({_split(each)[1]: value for each, value in beside.items()})


def made_states(module: nn.Module, state: Mapping[str, Any], placement: Placement) -> dict[str, Tensor]:
    """The entries of the module's state dict that are buffers which forwards have made since parameters were placed."""
    names = {name for name, buffer in module.named_buffers() if name not in placement.devices and not buffer.is_meta}
    return {name: state[name].detach() for name in names & state.keys()}
