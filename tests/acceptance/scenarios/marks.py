"""What the contract (docs/explanation/contract.md) says of each scenario."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SAME, WHOLE, DOOR, REFUSED = "same", "whole", "door", "refused"
"""The facts of one process; the same with a step as a whole, or with the door; refused with the way out."""

_WHOLE: Final = (
    *("step_Manual", "step_Adversarial", "step_OwnBackward", "step_Sharpness", "in_place_whole"),
    "batch_lists_of_samples",
    *("habit_FreezesInStep", "habit_EvaluatesInStep", "results_read_whole", "kept_early_metrics"),
    *("undivided_Graph", "undivided_Clouds", "undivided_skips", "undivided_averages"),
)
_DOOR: Final = (
    *("averages_in_a_checkpoint", "finetuning_resumed", "undivided_remembers"),
    *("samples_in_a_hook", "samples_in_a_callback", "probe_stops", "weights_in_a_hook"),
)
_FILLED: Final = tuple(f"filled_{name}" for name in ("batch", "list", "options", "object"))
WAYS_OUT: Final[Mapping[str, str]] = {
    "batch_size_found": "gpp-plan",
    "callback_pruning": "Prune the module before trainer.fit",
    "hook_NormOfWeights": "with lightning_gpp.summon_full_params(module):",
    "step_Quasi": "L-BFGS",
    "whole_Quasi": "L-BFGS",
    "loader_single_samples": "More micro-batches than samples",
    "refused_clouds": "depends on the number of samples",
    "refused_averages": "combines first.0.weight",
    "refused_kept_by_hook": "the step reads a tensor that a module computed but did not return (a hook",
    "refused_remembers": "which the step or another network call has set",
    **dict.fromkeys(_FILLED, "copy it at the beginning of the forward"),
    "refused_squares": "self.trainer.strategy.grad_norm()",
    "refused_norms_of_clamped": "self.trainer.strategy.grad_norm()",
    "refused_drops_gradients": "strategy.on_nonfinite=skip",
    "refused_teacher": "with lightning_gpp.summon_full_params(module):",
    "refused_early_metric": "The value of the metric mean is asked for between",
    "refused_large": "is_global_zero",
    "refused_gradient_hook": "on_before_optimizer_step",
    "refused_late_gradient_hook": "on_before_optimizer_step",
    "refused_repeated_closure": "called its closure more than once",
    "refused_texts": "reads texts or numbers of the batch that are no tensors",
    "refused_texts_whole": "reads texts or numbers of the batch that are no tensors",
    "refused_freezes_without_flush": "were frozen or unfrozen while mini-batches are",
    "refused_door_without_flush": "summon_full_params gathers no values with strategy.weights=stash",
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
