"""The walk finds the same parameters as the module, whatever was changed in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from lightning_gpp.training.tensors.walks import ParameterWalk


def _module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.ReLU())


def _tie(module: nn.Module) -> None:
    module[1][0].weight = module[1][1].weight


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda module: None,
    "a parameter is replaced": lambda module: setattr(module[1][0], "bias", nn.Parameter(module[1][0].bias.detach())),
    "a parameter is removed": lambda module: module[1][0].register_parameter("bias", None),
    "a parameter is added": lambda module: module[2].register_parameter("slope", nn.Parameter(module[0].bias * 2)),
    "a module is replaced": lambda module: module.__setitem__(2, nn.PReLU()),
    "a module is added": lambda module: module[1].append(nn.Linear(1, 1)),
    "a module is removed": lambda module: module.__delitem__(0),
    "a module deep inside grows": lambda module: setattr(module[1][0], "lora", nn.Linear(3, 3)),
    "parameters are tied": _tie,
    "the registry is replaced": lambda module: module[0].__dict__.update(_parameters={}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_parameters_are_those_of_the_module(change: Callable[[nn.Module], object]) -> None:
    module = _module()
    walk = ParameterWalk(module)
    assert list(map(id, walk())) == list(map(id, module.parameters()))
    change(module)
    assert list(map(id, walk())) == list(map(id, module.parameters()))


def test_modules_are_walked_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, walks = _module(), []
    walk, parameters = ParameterWalk(module), module.parameters
    monkeypatch.setattr(module, "parameters", lambda: walks.append(1) or parameters())
    assert walk() is walk()
    assert len(walks) == 1
