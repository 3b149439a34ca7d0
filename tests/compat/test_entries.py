"""Private names of torch and Lightning are in `_compat` alone, and every entry there is used and has a test."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from types import ModuleType

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torchmetrics import MeanMetric

import lightning_gpp
from lightning_gpp import _compat
from lightning_gpp._compat import (
    lightning,
    lightning_module,
    lightning_processes,
    omegaconf,
)
from lightning_gpp._compat import torch as torch_names

PACKAGE = Path(lightning_gpp.__file__).parent
COMPAT = Path(_compat.__file__).parent
TESTS = {
    torch_names: ("test_torch.py", "test_torch_autograd.py"),
    lightning: ("test_lightning.py",),
    lightning_module: ("test_lightning.py",),
    lightning_processes: ("test_lightning_processes.py",),
    omegaconf: ("test_omegaconf.py",),
}
PUBLIC = {"_replace", "_getframe", "_current_frames", "_exit", "_target_"}
"""Names with an underscore that are documented: of named tuples, `sys`, `os` and Hydra."""


def entries(module: ModuleType) -> list[str]:
    """Public names that a module of `_compat` defines, or imports under their own name on purpose."""
    names: list[str] = []
    for node in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.append(ast.unparse(node.target))
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname for alias in node.names if alias.asname]
    return [name for name in names if not name.startswith("_")]


ENTRIES = [(module, name) for module in TESTS for name in entries(module)]


@cache
def imported() -> set[str]:
    """Names that the package imports from `_compat`, or uses as attributes of its modules."""
    nodes = [node for path in others() for node in ast.walk(ast.parse(path.read_text()))]
    return {
        *(node.attr for node in nodes if isinstance(node, ast.Attribute)),
        *(alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names),
    }


def others() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if COMPAT not in path.parents]


@pytest.mark.parametrize(("module", "name"), ENTRIES, ids=[name for _, name in ENTRIES])
def test_entry_has_a_test(module: ModuleType, name: str) -> None:
    """Named after the entry, in snake case."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() and not name.isupper() else letter for letter in name)
    files = [ast.parse((Path(__file__).parent / name).read_text()) for name in TESTS[module]]
    tests = {node.name for file in files for node in file.body if isinstance(node, ast.FunctionDef)}
    assert f"test_{snake.lower().lstrip('_')}" in tests


@pytest.mark.parametrize(("module", "name"), ENTRIES, ids=[name for _, name in ENTRIES])
def test_entry_is_used(module: ModuleType, name: str) -> None:
    assert name in imported()


def private_attributes() -> set[str]:
    """Attributes with an underscore of the objects that the library works with."""
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    tensor = torch.ones(1, requires_grad=True)
    nodes = [(tensor @ tensor).grad_fn, torch.addmm(tensor, tensor[None], tensor[None]).grad_fn]
    objects = [
        *(tensor, tensor.untyped_storage(), nn.Linear(1, 1), torch.optim.SGD([tensor]), torch.ops.aten.add.Tensor),
        *(L.LightningModule(), L.LightningDataModule(), L.Callback(), trainer, trainer.fit_loop, DDPStrategy()),
        *(trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.automatic_optimization, MeanMetric(), *nodes),
    ]
    return {name for one in objects for name in dir(one) if name.startswith("_") and not name.startswith("__")}


def defined(path: Path) -> set[str]:
    """Names that a file defines: functions, classes, arguments, variables and attributes."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_private_attributes_are_used_where_they_are_defined() -> None:
    """In the same file; those of `self` perhaps in a base class of this package."""
    own = {path: defined(path) for path in others()}
    anywhere = set().union(*own.values())
    found = []
    for path, here in own.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in PUBLIC:
                is_inherited = ast.unparse(node.value) in ("self", "cls", "super()")
                if node.attr not in (anywhere if is_inherited else here):
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def test_private_attributes_are_not_used_by_name() -> None:
    """As in `getattr(module, "_buffers")`."""
    foreign = private_attributes()
    found = [f"{path.relative_to(PACKAGE)}: {name}" for path in others() for name in strings(path) & foreign]
    assert not found


def strings(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_private_modules_are_imported_in_compat() -> None:
    found = []
    for path in others():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                parts = [*(getattr(node, "module", None) or "").split("."), *(alias.name for alias in node.names)]
                if parts[0] not in ("lightning_gpp", "__future__") and any(
                    map(_is_private, ".".join(parts).split("."))
                ):
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
