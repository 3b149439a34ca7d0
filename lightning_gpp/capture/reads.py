"""Reads of attributes of modules by forwards and the step: the fingerprint by which a capture is known.

A forward that is cut runs with the values that it had when it was captured. Forwards that keep state there are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torchmetrics
from torch import Tensor, nn

from lightning_gpp._compat.lightning_module import LIGHTNING_STATE
from lightning_gpp._compat.torch import CHILDREN, buffers_of, pytree
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
from lightning_gpp.capture.recording import Event
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import CaptureError
from lightning_gpp.user_code import user_line
from lightning_gpp.wording import named

Buffers = Mapping[str, Mapping[str, Tensor | None]]
"""The buffers of modules by path and name."""

_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class AttributeReads:
    """Puts the attributes that are read into the recorder's recording, and finds those by which calls depend on others.

    Args:
        recorder: records the calls.
        uncut: paths of modules that are recorded as one call, which may keep state.
    """

    def __init__(self, recorder: Recorder, uncut: Collection[str]) -> None:
        self._recorder, self._uncut = recorder, uncut
        self._reader = dict[Attribute, int]()
        """The first module call that reads an attribute which nobody has set."""
        self._writer = dict[Attribute, int]()
        """The module call that has changed an attribute last, -1 for the step."""
        self._made = set[Attribute]()
        """Attributes that forwards set: what they add to them goes no further than the call."""
        self._by_step = dict[Attribute, str]()
        """The lines at which the step sets attributes of parts."""
        self._left = dict[tuple[Attribute, int, int], str]()
        """Attributes that one module call, or the step, leaves to another, or to its next: (attribute, scope that
        sets it, scope that reads it), with the line."""

    @property
    def in_forward(self) -> bool:
        """True while a forward runs, and not the step itself."""
        return self._recorder.scope != -1

    def read(self, path: str, name: str, value: Any) -> None:
        """Note that a forward, or the step, reads an attribute of a module, with what is in an object that it reads."""
        key, scope, recording = (path, name), self._recorder.scope, self._recorder.recording
        if scope == -1:
            recording.touched.add(path)
        elif key not in self._writer:
            self._reader.setdefault(key, scope)
        elif (key, self._writer[key], scope) not in self._left:
            self._left[key, self._writer[key], scope] = user_line()
        noted = recording.attributes.setdefault(scope, {})
        if self._recorder.paused or key in noted or key in self._writer:
            return
        inside = settings(name, value) if has_settings(value) else {name: value}
        noted.update({(path, inner): as_it_is(content) for inner, content in inside.items()})
        if scope == -1:
            recording.note(Event.READS_ATTRIBUTE, key)

    def set(self, path: str, name: str, before: Any, value: Any) -> None:
        """Note that an attribute is set."""
        key, scope, recording = (path, name), self._recorder.scope, self._recorder.recording
        if name == "training" or isinstance(value, nn.Module):
            return
        counts = keeps_state(before, value)
        if scope != -1:
            self._made.add(key)
            if counts or isinstance(value, Tensor):
                self._writer[key] = scope
                if key in self._reader:
                    self._left.setdefault((key, scope, self._reader[key]), user_line())
            return
        if counts and key in recording.attributes.get(-1, {}) and key not in self._writer:
            recording.set_by_step[key] = user_line()
        if path:
            self._by_step[key] = user_line()
        if isinstance(value, SCALARS) and not same_value(before, value):
            self._writer[key] = -1
        else:
            self._writer.pop(key, None)

    def compare(self, replica: nn.Module) -> None:
        """Find changes inside of objects and containers, when the recording is over."""
        recording = self._recorder.recording
        for scope, noted in recording.attributes.items():
            for key, value in noted.items():
                inside = "." in key[1] or not isinstance(value, SCALARS)
                now = AttributePlace(replica, key).read() if inside and is_plain(value) else value
                grows = scope != -1 and key not in self._made and _has_grown(value, now)
                if not (grows or keeps_state(value, now)):
                    continue
                if scope == -1:
                    recording.set_by_step[key] = "the step"
                else:
                    self._left[key, scope, scope] = recording.modules[scope].line

    def refuse(self, *, on_all_ranks: bool) -> None:
        """Refuse what calls leave to others, unless one module does all of it, which is never cut then.

        Args:
            on_all_ranks: whether all ranks run the step, so that what it sets is there.
        """
        network = self._recorder.recording.network
        for (key, writer, reader), line in self._left.items():
            begins_anew = writer != -1 and key in self._by_step
            crosses = writer == -1 if not on_all_ranks else -1 != network(writer) != network(reader)
            if begins_anew or crosses:
                raise self._shared(key, reader, self._by_step.get(key, line))
            if not on_all_ranks:
                self._refuse_cut(key, writer, reader, line)

    def _refuse_cut(self, key: Attribute, writer: int, reader: int, line: str) -> None:
        recording = self._recorder.recording
        inside = set(recording.called(reader))
        around = [path for path in recording.called(writer) if path in inside]
        if not around:
            raise self._shared(key, reader, line)
        if not any(f"{around[0]}.".startswith(f"{path}." if path else "") for path in self._uncut):
            raise refusal(
                line,
                f"the forward of {named(around[0])} changes {dotted(key)!r}, which it reads, from call to call; each "
                "micro-batch is a call",
                "make it in __init__, or register it as a buffer; count mini-batches in a hook such as "
                "on_train_batch_start",
                around,
            )

    def _shared(self, key: Attribute, reader: int, line: str) -> CaptureError:
        return refusal(
            line,
            f"the forward of {named(self._recorder.recording.modules[reader].path)} reads {dotted(key)!r}, which the "
            "step or another network call has set: stages run on other ranks, and call by call",
            "pass it to the forward as an argument, and return it",
        )


def _has_grown(before: Any, now: Any) -> bool:
    return isinstance(before, list | set | deque) and type(now) is type(before) and len(now) > len(before)


def observe(module: nn.Module, reads: AttributeReads) -> None:
    """Note what is read and set of the attributes that users may change.

    Args:
        module: a copy of the user's module, whose parts get classes of their own.
        reads: is told.
    """
    for path, part in module.named_modules():
        if not _is_called_as_it_is(part):
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
    object.__setattr__(part, "__class__", type(kind.__name__, (kind,), about))


def decisive(network: Network) -> dict[Attribute, Any]:
    """The numbers that the step reads, and on which what it calls up to its last network call may depend.

    The step runs as Python, with present values. What it computes between its network calls, and the numbers that it
    passes to modules, run in stages as they were captured.

    Raises:
        CaptureError: the step itself changes such a number, and would do so once per micro-batch.
    """
    recording, found = network.recording, dict[Attribute, Any]()
    early = {note.subject for note in recording.early(Event.READS_ATTRIBUTE)}
    passed = pytree.tree_leaves([(call.args, call.kwargs) for call in network.network_calls()])
    computed = pytree.tree_leaves([(call.args, call.kwargs) for call in network.calls if call.scope == -1])
    leaves = [*passed, *(leaf for leaf in computed if not isinstance(leaf, int))]  # whole numbers are mostly dimensions
    used = _numbers(leaves)
    computes = any(kind is float for kind, _ in used)  # perhaps with one that was computed from others
    for attribute, value in recording.attributes.get(-1, {}).items():
        numbers = _numbers(value.values() if isinstance(value, dict) else [value])
        if not (numbers and (attribute[0], attribute[1].partition(".")[0]) in early):
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


def buffers_in(module: nn.Module) -> Buffers:
    """The buffers of a module as they are now."""
    return {path: dict(buffers_of(part)) for path, part in module.named_modules()}


def refuse_made_parameters(replica: nn.Module, before: Mapping[str, nn.Parameter], step: str) -> None:
    """Refuse parameters that the step makes or replaces: no stage would have them, and no optimizer trains them.

    Raises:
        CaptureError: the recording has done so.
    """
    for name, parameter in replica.named_parameters(remove_duplicate=False):
        if parameter is not before.get(name):
            raise refusal(
                step,
                f"the parameter {name!r} is made or replaced while the step runs",
                "do this in __init__ or configure_model",
            )


def refuse_made_buffers(replica: nn.Module, before: Buffers, recorder: Recorder, uncut: Collection[str]) -> None:
    """Refuse buffers that a recording has made or given another form, and forwards that replace one and are cut: these
    would be on one rank alone.

    Raises:
        CaptureError: the recording has done so.
    """
    for path, part in replica.named_modules():
        for name, buffer in buffers_of(part).items():
            known = before.get(path, {}).get(name)
            if buffer is None or buffer is known:
                continue
            call = recorder.call_that_made(buffer)
            line, modules = (call.line, recorder.recording.called(call.scope)) if call else ("the step", [])
            if known is None or (known.shape, known.dtype) != (buffer.shape, buffer.dtype):
                raise refusal(
                    line,
                    f"the buffer {dotted((path, name))!r} is made, or gets another shape, while the step runs",
                    "register it in __init__ with the shape that it keeps, or compute it anew in each forward",
                )
            if modules and not any(f"{path}.".startswith(f"{each}.") for each in uncut):
                raise refusal(line, f"the forward replaces the buffer {name!r}", "change it in place (copy_)", modules)


# --- flags that the step itself sets, outside of forwards: stages run on other ranks, which do not run the step


class Switches:
    """Notes which flags of a module differ between its forwards.

    Args:
        module: the copy of the module on which the step runs.
        recorder: records the step.
    """

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        self._module, self._recorder, self._depth = module, recorder, 0
        self._switched = dict[tuple[str, str], None]()
        for part in module.modules():
            if part is not module:
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave)
        self._before = self._flags()

    def _enter(self, *_: Any) -> None:
        if self._depth == 0:
            self._compare()
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._before = self._flags()

    def _compare(self) -> None:
        now = self._flags()
        self._switched |= dict.fromkeys(key for key, flag in now.items() if self._before.get(key, flag) != flag)

    def _flags(self) -> dict[tuple[str, str], bool]:
        """The flags `training` of modules and `requires_grad` of parameters, by path, without recording their reads."""
        parts = ((path, vars(part)) for path, part in self._module.named_modules())
        modes = {(path, "training"): own["training"] for path, own in parts if "training" in own}  # compiled: none
        with self._recorder.pause():
            flags = {(name, "requires_grad"): each.requires_grad for name, each in self._module.named_parameters()}
        return modes | flags

    def refuse(self, step: str) -> None:
        """Refuse a step that has switched something, at its end.

        Raises:
            CaptureError: it has.
        """
        if self._depth == 0:
            self._compare()
        if self._switched:
            (path, flag), *others = self._switched
            more = f" and {len(others)} more" if others else ""
            raise refusal(
                step,
                f"it changes {flag} of {named(path)}{more} for the forwards that follow, which run on other ranks",
                "do so in a hook, such as on_train_batch_start or on_train_epoch_start",
            )
