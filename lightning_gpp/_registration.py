"""Registers `Trainer(strategy="gpp")` as soon as something loads Lightning, without loading it.

Lightning takes seconds to import, and planning, simulating and the runtime do not need it.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, Final

_REGISTRIES: Final = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")
"""Under both names of Lightning; the one that is loaded counts (`_one_lightning.py`)."""


def register() -> None:
    """Register the strategy now if Lightning is loaded, otherwise as soon as it is."""
    loaded = [sys.modules[name] for name in _REGISTRIES if hasattr(sys.modules.get(name), "StrategyRegistry")]
    if loaded:
        _register_in(loaded[0])
    elif not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())


def _register_in(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    if "gpp" not in registry:
        registry.register("gpp", make_strategy, description="Graph pipeline parallelism (lightning-gpp)")


def make_strategy(**kwargs: Any) -> Any:
    from lightning_gpp.strategy import GPPStrategy

    return GPPStrategy(**kwargs)


class _WhenLoaded(MetaPathFinder):
    """Finds the registry's module in the usual way, and registers the strategy after the module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _REGISTRIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            sys.meta_path.remove(self)
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register_in(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
