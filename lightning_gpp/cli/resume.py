"""The checkpoint from which a run that is started again goes on: the newest complete one in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_gpp._compat.lightning import resuming_from
from lightning_gpp.checkpoints.convert import opened

AUTO: Final = "auto"
"""The value of `ckpt_path` that asks for it."""
_NEEDED: Final = ("state_dict", "optimizer_states", "loops", "global_step")
"""Entries without which training cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint of training."""

    path: Path
    step: int
    """Optimizer steps done before it was saved."""
    modified: float

    @property
    def age(self) -> tuple[int, float]:
        """Grows with newer checkpoints: one from the middle of an epoch may follow another one of the same step."""
        return self.step, self.modified


def newest_checkpoint(folder: str | Path) -> Saved | None:
    """The newest complete checkpoint (file or folder) in a folder or below, whoever wrote it; None if there is none.

    Those that cannot be read to the end, and those without the state of training, are left out with a message.
    """
    paths = [path for path in sorted(Path(folder).rglob("*.ckpt")) if path.name[0] != "."]
    return max(filter(None, map(_saved, paths)), key=lambda saved: saved.age, default=None)


def _saved(path: Path) -> Saved | None:
    try:
        content = opened(path)
        missing = [name for name in _NEEDED if name not in content]
    except Exception as error:  # whatever a damaged file makes pickle raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        rank_zero_info(f"{path} is no complete checkpoint, and left out: {reason}")
        return None
    if missing:
        rank_zero_info(f"{path} has no {missing[0]!r}, so training cannot go on from it; it is left out.")
        return None
    return Saved(path=path, step=int(content["global_step"]), modified=path.stat().st_mtime)


@contextmanager
def resuming_by_itself(trainer: L.Trainer, folder: str | Path) -> Iterator[None]:
    """Inside, `trainer.fit` goes on from the newest checkpoint in the folder, or starts anew if there is none.

    Global rank 0 chooses for all ranks: others may not have the folder, or see it later.
    """

    def chosen() -> str | None:
        path: str | None = trainer.strategy.broadcast(_choice(folder) if trainer.is_global_zero else None)
        return path

    with resuming_from(trainer, chosen):
        yield


def _choice(folder: str | Path) -> str | None:
    saved = newest_checkpoint(folder)
    if saved is None:
        rank_zero_info(
            f"ckpt_path={AUTO}: no checkpoint in {folder}, so training starts from the beginning. To go on with an "
            "earlier run, start it in the same folder (hydra.run.dir=FOLDER)."
        )
        return None
    rank_zero_info(f"ckpt_path={AUTO}: training goes on after step {saved.step}, from {saved.path}.")
    return str(saved.path)
