"""Buffers that forwards make or replace during a run, such as tables of positions that the first forward fills in.

They belong to the ranks that run their modules; other ranks have them as they were at set-up, or not at all. So each
capture of the run sees them as they were at set-up: then all ranks record the same calls. At the next set-up, all ranks
have them.
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


class MadeBuffers:
    """The buffers that captures of a run found to be made or replaced by forwards, or by the step."""

    def __init__(self) -> None:
        self._first: Forms = {}
        self._names: set[str] = set()

    def begin(self, module: nn.Module, control: Control) -> None:
        """Give all ranks the buffers that an earlier run has made on some, yet without values; all call it together.

        The buffers of the module are then those that captures of the run begin with.
        """
        for forms in control.gather_all(_forms(module)) if control.num_processes > 1 else ():
            _add_missing(module, forms)
        self._first, self._names = _forms(module), set()

    def note(self, captured: Any) -> None:
        """Note the buffers that a captured step makes or replaces."""
        if isinstance(captured, Capture):
            self._names |= captured.network.recording.made_buffers

    @contextmanager
    def as_at_set_up(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module has these buffers as they were at set-up, without values where they are others now."""
        now = _forms(module)
        changed = [name for name in sorted(self._names) if _differ(now.get(name, _UNKNOWN), self._before(name))]
        tables = {path: buffers_of(module.get_submodule(path)) for path in {_split(name)[0] for name in changed}}
        kept = {path: dict(table) for path, table in tables.items()}
        for path, name in map(_split, changed):
            _put(tables[path], name, self._before(f"{path}.{name}".lstrip(".")))
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
            found[f"{path}.{name}".lstrip(".")] = form
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


def _add_missing(module: nn.Module, forms: Forms) -> None:
    """Register the buffers of another rank that this one lacks, or has in another form and without values."""
    own, parts = _forms(module), dict(module.named_modules())
    for name, form in forms.items():
        mine, (path, last) = own.get(name), _split(name)
        lacking = mine is None or not (mine.present or mine.fits(form))
        if form is not None and form.present and lacking and path in parts:
            parts[path].register_buffer(last, form.empty(), persistent=form.persistent)


def made_states(module: nn.Module, state: Mapping[str, Any], placement: Placement) -> dict[str, Tensor]:
    """The entries of the module's state dict that are buffers which forwards have made since parameters were placed."""
    names = {name for name, buffer in module.named_buffers() if name not in placement.devices and not buffer.is_meta}
    return {name: state[name].detach() for name in names & state.keys()}
