"""Registers `Trainer(strategy="gpp")` as soon as something loads Lightning, without loading it.

Lightning takes seconds to import, and planning, simulating and the runtime do not need it.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from lightning_gpp.errors import ConfigError


def make_strategy(**kwargs: Any) -> Any:
    """The strategy, for a trainer of `lightning.pytorch`."""
    from lightning_gpp.strategy import GPPStrategy

    return GPPStrategy(**kwargs)


def refuse(**_: Any) -> Any:
    """Refuse a trainer of `pytorch_lightning`, whose classes are copies of those that the strategy extends."""
    raise ConfigError(
        'strategy="gpp" was given to a Trainer of pytorch_lightning, which takes no strategy of lightning.pytorch. '
        "Write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`, in all of your code."
    )


_MAKERS = {"lightning.pytorch.strategies": make_strategy, "pytorch_lightning.strategies": refuse}


def register() -> None:
    """Register the strategy where Lightning is loaded, and otherwise as soon as it is."""
    for name in _MAKERS:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "StrategyRegistry"):
            _register_in(module)
    if not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())


def _register_in(module: ModuleType) -> None:
    if "gpp" not in module.StrategyRegistry:
        description = "Graph pipeline parallelism (lightning-gpp)"
        module.StrategyRegistry.register("gpp", _MAKERS[module.__name__], description=description)


class _WhenLoaded(MetaPathFinder):
    """Finds the registries' modules in the usual way, and registers the strategy after they have run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in _MAKERS else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register_in(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
