"""Buffers that the step or a forward replaces: those that it makes, or gives another form, are on one rank alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from lightning_gpp._compat.torch import buffers_of
from lightning_gpp.capture.attributes import dotted
from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.capture.refusal import refusal

Buffers = Mapping[str, Mapping[str, Tensor | None]]
"""The buffers of modules by path and name."""


def buffers_in(module: nn.Module) -> Buffers:
    """The buffers of a module as they are now."""
    return {path: dict(buffers_of(part)) for path, part in module.named_modules()}


def refuse_made_buffers(replica: nn.Module, before: Buffers, recorder: Recorder, uncut: Collection[str]) -> None:
    """Refuse buffers that a recording has made, and forwards that replace one and are cut.

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
