"""Tensors that a step makes or replaces in modules while it runs, such as positions that the first forward fills in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_gpp._compat.torch import buffers_of
from lightning_gpp.capture.attributes import OF_EVERY_MODULE, SCALARS, Attribute, dotted
from lightning_gpp.capture.recorder import Recorder


class MadeWatch:
    """Notes which buffers of a module a recording makes or replaces, and which plain attributes it fills.

    Args:
        replica: the copy of the user's module that is recorded, before it runs.
    """

    def __init__(self, replica: nn.Module) -> None:
        self._replica = replica
        self._before = {path: dict(buffers_of(part)) for path, part in replica.named_modules()}
        self._filled = {path: filled_attributes(part).keys() for path, part in replica.named_modules()}
        self._scalars = {path: scalars_of(part) for path, part in replica.named_modules()}

    def note(self, recorder: Recorder) -> None:
        """Note the buffers in the recording, and with the calls that made them: these hold what they replaced.

        And the attributes of the same modules that the recording has changed, such as the length of a table.
        """
        for path, part in self._replica.named_modules():
            buffers, before = buffers_of(part), self._before.get(path, {})
            made = {name for name, each in buffers.items() if each is not None and each is not before.get(name)}
            recorder.recording.made_buffers |= {dotted((path, name)) for name in made}
            for name in made:
                _hold(recorder, before.get(name), buffers[name])
            filled = filled_attributes(part).keys() - self._filled.get(path, set())
            if path and (made or filled):
                recorder.recording.made_attributes |= {
                    dotted((path, name)) for name in filled | self._set_in(path, part)
                }

    def _set_in(self, path: str, part: nn.Module) -> set[str]:
        """The numbers and texts of a module that the recording has changed."""
        before = self._scalars.get(path, {})
        return {name for name, value in scalars_of(part).items() if name not in before or before[name] != value}

    def filled(self) -> Iterator[Attribute]:
        """The attributes that have tensors since the recording ran, and had none before."""
        for path, part in self._replica.named_modules():
            for name in sorted(filled_attributes(part).keys() - self._filled.get(path, set())):
                yield path, name


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
