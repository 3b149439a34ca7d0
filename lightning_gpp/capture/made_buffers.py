"""Buffers that a step makes or replaces while it runs, such as tables of positions that the first forward fills in."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_gpp._compat.torch import buffers_of
from lightning_gpp.capture.recorder import Recorder


class BufferWatch:
    """Notes which buffers of a module a recording makes or replaces.

    Args:
        replica: the copy of the user's module that is recorded, before it runs.
    """

    def __init__(self, replica: nn.Module) -> None:
        self._replica = replica
        self._before = {path: dict(buffers_of(part)) for path, part in replica.named_modules()}

    def note(self, recorder: Recorder) -> None:
        """Note them in the recording, and with the calls that made the values: these hold what they replaced."""
        for path, part in self._replica.named_modules():
            before = self._before.get(path, {})
            for name, buffer in buffers_of(part).items():
                if buffer is not None and buffer is not before.get(name):
                    recorder.recording.made_buffers.add(f"{path}.{name}".lstrip("."))
                    _hold(recorder, before.get(name), buffer)


def _hold(recorder: Recorder, replaced: Tensor | None, buffer: Tensor) -> None:
    if replaced is not None:
        recorder.hold(buffer, replaced)
