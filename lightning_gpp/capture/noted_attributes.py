"""Notes of the attributes that forwards and the step read in a recording.

Forwards that keep state in them are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_gpp._compat.torch import CHILDREN
from lightning_gpp.capture.attributes import Attribute, as_it_is, dotted, has_settings, restore, settings
from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.user_code import user_line
from lightning_gpp.wording import named


class NotedAttributes:
    """Puts the attributes that are read into the recorder's recording; see `AttributeObserver`.

    Args:
        recorder: records the calls.
        uncut: paths of modules that are recorded as one call, which may keep state.
    """

    def __init__(self, recorder: Recorder, uncut: Collection[str]) -> None:
        self._recorder, self._uncut = recorder, uncut
        self._inside: dict[Attribute, dict[Attribute, Any]] = {}
        """Attributes that were read, each with what was in it at that time."""
        self._set = dict[Attribute, tuple[str, bool]]()
        """Attributes of parts that the step has set, with the lines, and whether they are numbers that have changed."""
        self._kept = dict[Attribute, int]()
        """Attributes that forwards have set since, with the network calls that they are in."""
        self._changed, self._read = dict[Attribute, int](), set[Attribute]()
        """All that forwards have set, and all that they have read."""
        self._setters = dict[Attribute, int]()
        """The first module calls that have set attributes."""
        self._read_after, self._left = dict[Attribute, int](), dict[Attribute, int]()
        """Module calls that have read attributes that the step has set, or an earlier network call."""

    def read(self, path: str, name: str, value: Any) -> None:
        """Note that a forward, or the step, reads an attribute of a module, with what is in an object that it reads."""
        if (path, name) not in self._inside:
            inside = settings(name, value) if has_settings(value) else {name: value}
            self._inside[path, name] = {(path, inner): as_it_is(content) for inner, content in inside.items()}
        in_step = self._recorder.scope == -1
        if in_step:
            self._recorder.recording.touched.add(path)
        else:
            self._read.add((path, name))
        noted = self._recorder.recording.attributes.setdefault(self._recorder.scope, {})
        if self._recorder.paused or (path, name) in noted or (in_step and name.startswith(CHILDREN)):
            return
        noted.update({(path, name): value} if in_step else self._inside[path, name])

    def changed(self, path: str, name: str) -> None:
        """Note that the step changes an attribute that it reads; refuse a forward that does, unless it is not cut."""
        scope, recording = self._recorder.scope, self._recorder.recording
        if self._recorder.paused or (path, name) not in recording.attributes.get(scope, {}):
            return
        if scope == -1:
            recording.set_by_step[path, name] = user_line()
        else:
            self._refuse_change(scope, (path, name), user_line())

    def set(self, path: str, name: str, changes: bool) -> None:
        """Note that the step sets an attribute of a part, or that a forward does."""
        scope, key = self._recorder.scope, (path, name)
        if scope != -1:
            self._setters.setdefault(key, scope)
            self._kept[key] = self._changed[key] = self._recorder.recording.network(scope)
        elif path:
            self._kept.pop(key, None)
            self._set[key] = user_line(), changes

    def read_again(self, path: str, name: str) -> None:
        """Note that a forward reads what the step, or a forward of another network call, has set."""
        scope, key = self._recorder.scope, (path, name)
        if scope == -1:
            return
        self._read.add(key)
        network = self._recorder.recording.network(scope)
        if self._kept.get(key, network) != network:
            self._left.setdefault(key, scope)
        elif key in self._set and self._set[key][1]:
            self._read_after.setdefault(key, scope)

    def refuse(self, *, on_all_ranks: bool) -> None:
        """Refuse what forwards and the step, or several network calls, share in attributes of parts.

        Args:
            on_all_ranks: whether all ranks run the step, so that what it sets is there.
        """
        shared = {} if on_all_ranks else self._read_after
        carried = {key: scope for key, scope in self._changed.items() if key in self._read and key in self._set}
        left = self._left if on_all_ranks else {}
        for attribute, scope in {**shared, **carried, **left}.items():
            call = self._recorder.recording.modules[scope]
            raise refusal(
                self._set[attribute][0] if attribute in self._set else call.line,
                f"the forward of {named(call.path)} reads {dotted(attribute)!r}, which the step or another network "
                "call has set: stages run on other ranks, and call by call",
                "pass it to the forward as an argument, and return it; or set it in a hook such as "
                "on_train_batch_start, if it is a number",
            )

    def refuse_kept_tensors(self, filled: Iterable[Attribute]) -> None:
        """Refuse a forward that is cut, and reads a tensor that it has put into an attribute: it would be frozen."""
        for key in filled:
            if key in self._read and key in self._setters:
                scope = self._setters[key]
                modules = self._recorder.recording.called(scope)
                if modules[0] not in self._uncut:
                    raise refusal(
                        self._recorder.recording.modules[scope].line,
                        f"the forward of {named(modules[0])} keeps a tensor in {dotted(key)!r} for later calls",
                        "make it in __init__, or register it as a buffer",
                        modules,
                    )

    @contextmanager
    def restored(self, replica: nn.Module) -> Iterator[None]:
        """Undo what forwards change inside of objects, which the module shares with its copy.

        Raises:
            CaptureError: a forward counts its calls in one of them.
        """
        counters = set[Attribute]()
        try:
            yield
        finally:
            noted = {key: value for values in self._inside.values() for key, value in values.items()}
            counters |= restore(replica, noted)
        recording = self._recorder.recording
        for scope, read in list(recording.attributes.items()):
            for attribute in sorted(counters & read.keys()):
                self._refuse_change(scope, attribute)
        recording.set_by_step |= {each: recording.modules[0].line for each in counters if recording.modules}

    def _refuse_change(self, scope: int, attribute: Attribute, line: str = "") -> None:
        """Refuse the change of an attribute by a forward that reads it, unless the forward is not cut."""
        recording = self._recorder.recording
        own = recording.modules[scope].path if scope != -1 else None
        path, name = attribute
        if own is None or own in self._uncut or not (own == "" or f"{path}.".startswith(f"{own}.")):
            return
        raise refusal(
            line or recording.modules[scope].line,
            f"the forward changes {dotted(('', name))!r}, which it reads, from call to call; "
            "each micro-batch is a call",
            "count mini-batches in a hook such as on_train_batch_start",
            recording.called(scope),
        )
