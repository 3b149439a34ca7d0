"""One Lightning in a process: `lightning.pytorch` and `pytorch_lightning` are two names for the same code.

They are installed together, each with classes of its own, and a trainer of one takes no strategy of the other. So the
one that a process loads first is the one that this library extends, and the other name stands for it from then on.
Where both were loaded before this library, or their versions differ, they stay apart, and `lightning.pytorch` counts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Final

_PAIRS: Final = (("lightning.pytorch", "pytorch_lightning"), ("lightning.fabric", "lightning_fabric"))
_OTHER: Final = {name: other for pair in _PAIRS for name, other in (pair, pair[::-1])}


def unify() -> None:
    """Let the name of Lightning that is loaded second stand for the first one."""
    if not any(isinstance(finder, _SecondName) for finder in sys.meta_path):
        sys.meta_path.insert(0, _SecondName())


def is_second(name: str) -> bool:
    """True if this top package of Lightning is not loaded, and the other one is."""
    return not _is_loaded(name) and _is_loaded(_OTHER[name]) and _same_version()


def _is_loaded(package: str) -> bool:
    """True if a package is loaded under its own name."""
    module = sys.modules.get(package)
    return module is not None and module.__name__ == package


@cache
def _same_version() -> bool:
    try:
        return version("lightning") == version("pytorch-lightning")
    except PackageNotFoundError:
        return False


class _SecondName(MetaPathFinder):
    """Finds the modules of the second name."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        for package, other in _OTHER.items():
            if (name == package or name.startswith(f"{package}.")) and is_second(package):
                return ModuleSpec(name, _Alias(other + name.removeprefix(package)))
        return None


class _Alias(Loader):
    """Loads a module under its first name; import writes the second one into its spec, which is undone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
