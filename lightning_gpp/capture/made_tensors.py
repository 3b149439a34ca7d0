"""Tensors that a step makes or replaces in modules while it runs, such as positions that the first forward fills in.

They are buffers, or plain attributes that were None or did not exist. With them belong the numbers that say for what
they were made, such as the longest sequence so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_gpp._compat.torch import buffers_of
from lightning_gpp.capture.attributes import OF_EVERY_MODULE, SCALARS, dotted
from lightning_gpp.capture.recorder import Recorder


class MadeWatch:
    """Notes which buffers of a module a recording makes or replaces, which attributes it fills, and numbers with them.

    Args:
        replica: the copy of the user's module that is recorded, before it runs.
    """

    def __init__(self, replica: nn.Module) -> None:
        self._replica = replica
        self._before = {path: dict(buffers_of(part)) for path, part in replica.named_modules()}
        self._filled = {path: filled_attributes(part).keys() for path, part in replica.named_modules()}
        self._scalars = {path: scalars_of(part) for path, part in replica.named_modules()}

    def note(self, recorder: Recorder) -> None:
        """Note them in the recording, and with the calls that made buffers: these hold what they replaced."""
        recording = recorder.recording
        for path, part in self._replica.named_modules():
            buffers, before = buffers_of(part), self._before.get(path, {})
            made = {name for name, each in buffers.items() if each is not None and each is not before.get(name)}
            filled = filled_attributes(part).keys() - self._filled.get(path, set())
            recording.made_buffers |= {dotted((path, name)) for name in made}
            recording.filled_attributes |= {dotted((path, name)) for name in filled}
            if made | filled:
                recording.filled_attributes |= {dotted((path, name)) for name in self._changed_scalars(path, part)}
            for name in made:
                _hold(recorder, before.get(name), buffers[name])

    def _changed_scalars(self, path: str, part: nn.Module) -> set[str]:
        before, now = self._scalars.get(path, {}), scalars_of(part)
        return {name for name in before.keys() & now.keys() if before[name] != now[name]}


def filled_attributes(part: nn.Module) -> Mapping[str, Tensor]:
    """The tensors in plain attributes of a module, by name."""
    own = vars(part).items()
    return {name: value for name, value in own if isinstance(value, Tensor) and name not in OF_EVERY_MODULE}


def scalars_of(part: nn.Module) -> dict[str, Any]:
    """The numbers and texts in plain attributes of a module, by name, and those that are None."""
    own = vars(part).items()
    return {name: value for name, value in own if type(value) in SCALARS and name not in OF_EVERY_MODULE}


def _hold(recorder: Recorder, replaced: Tensor | None, buffer: Tensor) -> None:
    if replaced is not None:
        recorder.hold(buffer, replaced)
