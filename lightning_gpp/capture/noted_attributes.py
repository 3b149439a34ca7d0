"""Notes of the attributes that forwards and the step read in a recording.

Forwards that keep state in them are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_gpp._compat.torch import CHILDREN
from lightning_gpp.capture.attributes import Attribute, as_it_is, dotted, has_settings, restore, settings
from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.user_code import user_line


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

    def read(self, path: str, name: str, value: Any) -> None:
        """Note that a forward, or the step, reads an attribute of a module, with what is in an object that it reads."""
        if (path, name) not in self._inside:
            inside = settings(name, value) if has_settings(value) else {name: value}
            self._inside[path, name] = {(path, inner): as_it_is(content) for inner, content in inside.items()}
        in_step = self._recorder.scope == -1
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
