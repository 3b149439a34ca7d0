"""Reads of attributes of modules by forwards and the step: the fingerprint by which a capture is known.

A forward that is cut runs with the values that it had when it was captured. Forwards that keep state there are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torchmetrics
from torch import Tensor, nn

from lightning_gpp._compat.lightning_module import LIGHTNING_STATE
from lightning_gpp._compat.torch import CHILDREN, pytree
from lightning_gpp.capture.attributes import (
    LIBRARIES,
    OF_EVERY_MODULE,
    SCALARS,
    Attribute,
    AttributePlace,
    as_it_is,
    dotted,
    has_settings,
    is_plain,
    keeps_state,
    same_value,
    settings,
)
from lightning_gpp.capture.network import Network
from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.user_code import user_line
from lightning_gpp.wording import named

_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class _LastSet:
    """`network`: number of the network call that has set an attribute, -1 for the step. `changes`: a scalar's value."""

    network: int
    changes: bool


class AttributeReads:
    """Puts the attributes that are read into the recorder's recording.

    Args:
        recorder: records the calls.
        uncut: paths of modules that are recorded as one call, which may keep state.
    """

    def __init__(self, recorder: Recorder, uncut: Collection[str]) -> None:
        self._recorder, self._uncut = recorder, uncut
        self._last = dict[Attribute, _LastSet]()
        self._by_step, self._by_forwards = dict[Attribute, str](), dict[Attribute, int]()
        """The lines at which the step sets attributes of parts, and the module calls that set some."""
        self._read = set[Attribute]()
        """Attributes that forwards read."""
        self._tensors = set[Attribute]()
        """Attributes in which forwards put tensors."""
        self._crossing: dict[bool, dict[Attribute, int]] = {True: {}, False: {}}
        """Module calls that read what another network call has set (True), or the step (False)."""

    @property
    def in_forward(self) -> bool:
        """True while a forward runs, and not the step itself."""
        return self._recorder.scope != -1

    def read(self, path: str, name: str, value: Any) -> None:
        """Note that a forward, or the step, reads an attribute of a module, with what is in an object that it reads."""
        key, scope, recording = (path, name), self._recorder.scope, self._recorder.recording
        if scope == -1:
            recording.touched.add(path)
        else:
            self._read.add(key)
        if key in self._last:
            self._read_again(key, scope)
            return
        noted = recording.attributes.setdefault(scope, {})
        if self._recorder.paused or key in noted:
            return
        inside = settings(name, value) if has_settings(value) else {name: value}
        noted.update({(path, inner): as_it_is(content) for inner, content in inside.items()})
        if scope == -1:
            recording.read_at.setdefault(key, len(recording.modules))

    def _read_again(self, key: Attribute, scope: int) -> None:
        last, network = self._last[key], self._recorder.recording.network(scope)
        if scope != -1 and last.network != network and (last.network != -1 or last.changes):
            self._crossing[last.network != -1].setdefault(key, scope)

    def set(self, path: str, name: str, before: Any, value: Any) -> None:
        """Note that an attribute is set; refuse a forward that counts in one that it reads, unless it is not cut."""
        key, scope, recording = (path, name), self._recorder.scope, self._recorder.recording
        counts = key in recording.attributes.get(scope, {}) and keeps_state(before, value)
        if counts and not self._recorder.paused and key not in self._last:
            self._note_change(scope, key, user_line())
        if name == "training" or isinstance(value, nn.Module):
            return
        if scope != -1:
            self._by_forwards.setdefault(key, scope)
            self._tensors |= {key} if isinstance(value, Tensor) else set()
        elif path:
            self._by_step[key] = user_line()
        changes = isinstance(value, SCALARS) and not same_value(before, value)
        self._last[key] = _LastSet(recording.network(scope), changes)

    def _note_change(self, scope: int, attribute: Attribute, line: str) -> None:
        """Note that the step changes what it reads; refuse a forward that does, unless it is not cut."""
        recording = self._recorder.recording
        if scope == -1:
            recording.set_by_step[attribute] = line
            return
        path, name = attribute
        own = recording.modules[scope].path
        if own not in self._uncut and (own == "" or f"{path}.".startswith(f"{own}.")):
            raise refusal(
                line,
                f"the forward changes {dotted(('', name))!r}, which it reads, from call to call; "
                "each micro-batch is a call",
                "count mini-batches in a hook such as on_train_batch_start",
                recording.called(scope),
            )

    def compare(self, replica: nn.Module) -> None:
        """Find changes inside of objects and containers, when the recording is over."""
        recording = self._recorder.recording
        for scope, noted in list(recording.attributes.items()):
            for key, value in list(noted.items()):
                inside = "." in key[1] or not isinstance(value, SCALARS)
                if inside and is_plain(value) and keeps_state(value, AttributePlace(replica, key).read()):
                    self._note_change(scope, key, recording.modules[scope].line if scope != -1 else "the step")

    def refuse(self, *, on_all_ranks: bool) -> None:
        """Refuse what forwards and the step, or several network calls, share in attributes of parts.

        Args:
            on_all_ranks: whether all ranks run the step, so that what it sets is there.
        """
        shared = self._by_forwards.keys() & self._by_step.keys() & self._read
        recording = self._recorder.recording
        found = self._crossing[on_all_ranks] | {key: self._by_forwards[key] for key in sorted(shared)}
        for attribute, scope in found.items():
            call = recording.modules[scope]
            raise refusal(
                self._by_step.get(attribute, call.line),
                f"the forward of {named(call.path)} reads {dotted(attribute)!r}, which the step or another network "
                "call has set: stages run on other ranks, and call by call",
                "pass it to the forward as an argument, and return it; or set it in a hook such as "
                "on_train_batch_start, if it is a number",
            )
        for key in () if on_all_ranks else sorted(self._tensors & self._read):
            scope = self._by_forwards[key]
            modules = recording.called(scope)
            if modules[0] not in self._uncut:
                raise refusal(
                    recording.modules[scope].line,
                    f"the forward of {named(modules[0])} keeps a tensor in {dotted(key)!r} for later calls",
                    "make it in __init__, or register it as a buffer",
                    modules,
                )


def observe(module: nn.Module, reads: AttributeReads) -> None:
    """Note what is read and set of the attributes that users may change.

    Args:
        module: a copy of the user's module, whose parts get classes of their own.
        reads: is told.
    """
    for path, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule) and not _is_called_as_it_is(part):
            _observe(part, path, reads)


def _of_class(kind: type) -> set[str]:
    """Names of values of the user's classes."""
    users = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in LIBRARIES]
    values = {name: value for base in reversed(users) for name, value in vars(base).items()}
    return {name for name, value in values.items() if name[:2] != "__" and (is_plain(value) or has_settings(value))}


def _is_called_as_it_is(part: nn.Module) -> bool:
    """True for metrics, which the step calls, and for layers of torch, which stages call."""
    if isinstance(part, torchmetrics.Metric | torchmetrics.MetricCollection):
        return True
    return type(part).__module__.startswith("torch.nn") and not any(True for _ in part.children())


def _observe(part: nn.Module, path: str, reads: AttributeReads) -> None:
    kind = type(part)
    names = {"training", *_of_class(kind), *(vars(part).keys() - OF_EVERY_MODULE - LIGHTNING_STATE)}

    def read(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name == CHILDREN and isinstance(self, _CONTAINERS):
            read_parts(value)
        elif name in names:
            reads.read(path, name, value)
        return value

    def read_part(self: nn.Module, name: str) -> Any:
        value = kind.__getattr__(self, name)
        if isinstance(value, nn.Module):
            read_parts({name: value})
        return value

    def read_parts(parts: Mapping[str, nn.Module]) -> None:
        for name, value in parts.items():
            if "." not in name and reads.in_forward:
                reads.read(path, f"{CHILDREN}.{name}", value)

    def write(self: nn.Module, name: str, value: Any) -> None:
        before = vars(self).get(name, getattr(kind, name, None))
        kind.__setattr__(self, name, value)
        names.discard(name) if name == "training" else names.add(name)
        reads.set(path, name, before, value)

    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    about |= {"__getattribute__": read, "__getattr__": read_part, "__setattr__": write}  # type: ignore[dict-item]
    try:
        object.__setattr__(part, "__class__", type(kind.__name__, (kind,), about))
    except TypeError:  # a class that allows no other layout, as those of torch.jit
        return


def decisive(network: Network) -> dict[Attribute, Any]:
    """The numbers that the step reads, and on which what it calls up to its last network call may depend.

    The step runs as Python, with present values. What it computes between its network calls, and the numbers that it
    passes to modules, run in stages as they were captured.

    Raises:
        CaptureError: the step itself changes such a number, and would do so once per micro-batch.
    """
    recording, found = network.recording, dict[Attribute, Any]()
    passed = pytree.tree_leaves([(call.args, call.kwargs) for call in network.network_calls()])
    computed = pytree.tree_leaves([(call.args, call.kwargs) for call in network.calls if call.scope == -1])
    leaves = [*passed, *(leaf for leaf in computed if not isinstance(leaf, int))]  # whole numbers are mostly dimensions
    used = _numbers(leaves)
    computes = any(kind is float for kind, _ in used)  # perhaps with one that was computed from others
    for attribute, value in recording.attributes.get(-1, {}).items():
        numbers = _numbers(value.values() if isinstance(value, dict) else [value])
        if not (numbers and recording.is_read_early(attribute)):
            continue
        counts = bool(numbers & used) or (computes and any(kind is float for kind, _ in numbers))
        if attribute not in recording.set_by_step and counts:
            found[attribute] = value
        elif numbers & used:
            raise refusal(
                recording.set_by_step[attribute],
                f"the step changes {dotted(attribute)!r}, on which depends what its modules get, and would do so once "
                "per micro-batch",
                "change it in a hook such as on_train_batch_end",
            )
    return found


def _numbers(values: Iterable[Any]) -> set[tuple[type, float]]:
    """The numbers among values, with their types, because 1 is not 1.0 here."""
    return {(type(value), value) for value in values if type(value) in (int, float)}
