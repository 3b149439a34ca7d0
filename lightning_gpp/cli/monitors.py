"""A callback that notices misspelt monitors before training: Lightning looks at them after an epoch or later."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Final

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_warn

_ALIKE: Final = 0.75
"""The similarity of names (difflib's ratio) from which one is taken for a misspelt other one."""


class Monitors(L.Callback):
    """Warns, after the sanity check, of a callback that watches almost what validation logs.

    A warning, because training may log the value, or a hook that has not been called yet.
    """

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        known = sorted(trainer.callback_metrics)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        for callback in callbacks:
            monitor = getattr(callback, "monitor", None)
            if not isinstance(monitor, str) or monitor in known:
                continue
            if meant := get_close_matches(monitor, known, n=1, cutoff=_ALIKE):
                rank_zero_warn(
                    f"{type(callback).__name__} has monitor={monitor}, which validation does not log; it logs "
                    f"{', '.join(known)}. If training does not log it either, the run ends when it is first looked at. "
                    f"Did you mean {meant[0]}?"
                )
