"""Values of other ranks that hooks log: every rank logs them, so that all callbacks see the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_gpp.replaced import Replaced
from lightning_gpp.training.foreign import Foreign, with_lent_values


class LoggedValues:
    """Lets `self.log` take values that other ranks lend; where they lend none, it raises what foreign tensors raise."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module, self._replaced = module, Replaced()

    def attach(self) -> None:
        for part in self._module.modules():
            if isinstance(part, pl.LightningModule):
                self._replaced.put(part, "log", partial(_logged, part.log))

    def detach(self) -> None:
        self._replaced.restore()


def _logged(plain: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    value = with_lent_values(value)
    plain(name, float(value) if isinstance(value, Foreign) else value, *args, **kwargs)
