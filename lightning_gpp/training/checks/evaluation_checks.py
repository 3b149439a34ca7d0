"""Evaluation steps that cannot run on micro-batches, although their networks can: they run as a whole."""

from __future__ import annotations

from typing import Final

from lightning_gpp.capture.recording import Ref
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.stages.step import UserStep

_BY_POSITION: Final = {
    *("__getitem__", "__setitem__", "index_select", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("index_put", "index_put_", "index_fill", "index_fill_"),
}


def check_decisions(step: UserStep) -> None:
    """Refuse a step that decides by data, or whose recording ended before the step did: it may call the network again.

    Raises:
        CaptureError: it does.
    """
    recording = step.network.recording
    if recording.complete and not recording.truths:
        return
    line = recording.truths[-1][1] if recording.complete else recording.stopped.partition(": ")[0]
    raise refusal(
        line,
        "what the step does depends on data, perhaps also how often it calls the network",
        "decide inside of a module's forward, or compute without a decision (torch.where)",
    )


def check_positions(step: UserStep) -> None:
    """Refuse a step that indexes results of the network by positions in the mini-batch (`h[torch.arange(len(h)), y]`).

    In evaluation the step runs once per mini-batch, and its tensors are cut for micro-batches, in which samples have
    other positions.

    Raises:
        CaptureError: it does.
    """
    for call in step.network.calls:
        if call.scope == -1 and call.target in _BY_POSITION and any(_has_positions(step, ref) for ref in call.refs()):
            raise refusal(
                call.line,
                "the step indexes results of the network by positions of samples in the mini-batch",
                "do it in a module's forward, or behind the step's last call of a module",
            )


def _has_positions(step: UserStep, ref: Ref) -> bool:
    """True for whole numbers of all samples that the step has made, or has got from the mini-batch."""
    spec = step.spec_of(ref)
    return ref.call < 0 and spec.varies and "int" in spec.dtype
