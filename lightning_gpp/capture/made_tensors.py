"""Tensors that a step makes or replaces in modules while it runs, such as positions that the first forward fills in.

They are buffers, or plain attributes that were None or did not exist.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_gpp._compat.torch import buffers_of
from lightning_gpp.capture.attributes import OF_EVERY_MODULE
from lightning_gpp.capture.recorder import Recorder


class MadeWatch:
    """Notes which buffers of a module a recording makes or replaces, and which attributes it fills.

    Args:
        replica: the copy of the user's module that is recorded, before it runs.
    """

    def __init__(self, replica: nn.Module) -> None:
        self._replica = replica
        self._before = {path: dict(buffers_of(part)) for path, part in replica.named_modules()}
        self._filled = {path: filled_attributes(part).keys() for path, part in replica.named_modules()}

    def note(self, recorder: Recorder) -> None:
        """Note them in the recording, and with the calls that made buffers: these hold what they replaced."""
        for path, part in self._replica.named_modules():
            before = self._before.get(path, {})
            for name, buffer in buffers_of(part).items():
                if buffer is not None and buffer is not before.get(name):
                    recorder.recording.made_buffers.add(full_name(path, name))
                    _hold(recorder, before.get(name), buffer)
            filled = filled_attributes(part).keys() - self._filled.get(path, set())
            recorder.recording.filled_attributes |= {full_name(path, name) for name in filled}


def filled_attributes(part: nn.Module) -> Mapping[str, Tensor]:
    """The tensors in plain attributes of a module, by name."""
    own = vars(part).items()
    return {name: value for name, value in own if isinstance(value, Tensor) and name not in OF_EVERY_MODULE}


def full_name(path: str, name: str) -> str:
    """The name of a buffer or attribute of the module at `path`."""
    return f"{path}.{name}".lstrip(".")


def _hold(recorder: Recorder, replaced: Tensor | None, buffer: Tensor) -> None:
    if replaced is not None:
        recorder.hold(buffer, replaced)
