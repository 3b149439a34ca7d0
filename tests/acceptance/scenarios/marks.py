"""What the contract (docs/contract.md) says of each scenario."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SAME, WHOLE, DOOR, REFUSED = "same", "whole", "door", "refused"
"""The facts of one process; the same with a step as a whole, or with the door; refused with the way out."""

_WHOLE: Final = (
    *("step_Manual", "step_Adversarial", "step_OwnBackward", "step_Sharpness", "in_place_whole"),
    "batch_lists_of_samples",
)
_DOOR: Final = ("samples_in_a_hook", "samples_in_a_callback", "probe_stops", "weights_in_a_hook", "hook_ReadsWeights")
WAYS_OUT: Final[Mapping[str, str]] = {
    "batch_size_found": "gpp-plan",
    "batch_size_tuned": "gpp-plan",
    "callback_pruning": "Prune the module before trainer.fit",
    "hook_NormOfWeights": "with lightning_gpp.summon_full_params(module):",
    "step_Quasi": "L-BFGS",
    "whole_Quasi": "L-BFGS",
    "step_ReturnsNone": "return a zero loss",
    "loader_single_samples": "More micro-batches than samples",
}
"""Scenarios that are refused on two ranks, with words of the way out or of the reason."""

MARKS: Final[Mapping[str, str]] = {
    **dict.fromkeys(_WHOLE, WHOLE),
    **dict.fromkeys(_DOOR, DOOR),
    **dict.fromkeys(WAYS_OUT, REFUSED),
}
"""The marks of scenarios; those that are left out have the same facts as one process. See `mark_of`."""


def mark_of(name: str) -> str:
    """The mark of a scenario."""
    return MARKS.get(name, WHOLE if name.startswith("whole_") else SAME)
