"""State outside of a module that its steps may change: global variables, classes, closures, trainer, callbacks, data,
hyperparameters of optimizers.

Other ranks read it in hooks and loaders, and runs of the step that do not count must leave it as it is. Its places are
attributes (`capture.attributes`) whose paths begin with `@`, so that they have the same names on every rank.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Set
from typing import Any, Final

from torch import Tensor, nn

from lightning_gpp._compat.lightning_module import trainer_of
from lightning_gpp.hook_code import names_in_hook, names_set
from lightning_gpp.user_code import is_user_code, own_attributes, user_function

OUTSIDE: Final = "@"
"""The beginning of paths that lead out of the module."""
_GLOBAL, _CLASS, _CLOSURE = "@global", "@class", "@closure"
_TRAINER, _CALLBACK, _DATA, _OPTIMIZER = "@trainer", "@callback", "@datamodule", "@optimizer"
_NO_STATE: Final = (nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, property)
_WRAPPERS: Final = (staticmethod, classmethod)


class _Variables:
    """The variables around a function, as attributes."""

    def __init__(self, function: types.FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        object.__setattr__(self, "_cells", dict(cells))

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_cells")[name].cell_contents
        except (KeyError, ValueError):  # a variable without a value
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_cells")[name].cell_contents = value


def owner_of(module: nn.Module, path: str) -> Any:
    """The object or dictionary that a path with `@` leads to; an empty dictionary if there is none on this rank."""
    kind, _, detail = path.partition(":")
    trainer = trainer_of(module)
    if kind in (_GLOBAL, _CLOSURE):
        function = _function_of(module, detail)
        if function is None:
            return {}
        return function.__globals__ if kind == _GLOBAL else _Variables(function)
    if kind == _CLASS:
        return type(module).__mro__[int(detail)]
    if kind == _OPTIMIZER:
        number, _, group = detail.partition(":")
        groups = [each.param_groups for each in getattr(trainer, "optimizers", [])][int(number) :][:1]
        return groups[0][int(group)] if groups and int(group) < len(groups[0]) else {}
    if kind == _CALLBACK:
        callbacks = list(getattr(trainer, "callbacks", []))
        return callbacks[int(detail)] if int(detail) < len(callbacks) else {}
    found = getattr(trainer, "datamodule", None) if kind == _DATA else trainer
    return {} if found is None else found


def _function_of(module: nn.Module, name: str) -> types.FunctionType | None:
    """The user's function behind a method, which a module may have instead of its class."""
    own = vars(module).get(name)
    return user_function(getattr(type(module), name, None) if own is None else own)


def outside(module: nn.Module, step: str) -> list[tuple[str, str]]:
    """The attributes outside of a module that the code of a step mentions, or may reach through the trainer."""
    function = _function_of(module, step)
    if function is None:
        return []
    names = names_in_hook(function, [module])
    of_trainer = _of_trainer(trainer_of(module), names, names_set(function))
    return sorted({*_in_code(module, step, function, names), *of_trainer})


def _in_code(module: nn.Module, step: str, function: types.FunctionType, names: Set[str]) -> Iterator[tuple[str, str]]:
    values = function.__globals__
    yield from ((f"{_GLOBAL}:{step}", name) for name in names & values.keys() if _is_state(values[name]))
    variables = _Variables(function)
    for name in function.__code__.co_freevars:
        if name != "__class__" and _is_state(getattr(variables, name, module)):
            yield f"{_CLOSURE}:{step}", name
    for number, kind in enumerate(type(module).__mro__):
        if _is_users(kind):
            own = vars(kind)
            yield from ((f"{_CLASS}:{number}", name) for name in names & own.keys() if _is_state(own[name]))


def _of_trainer(trainer: Any, names: frozenset[str], stored: set[str]) -> Iterator[tuple[str, str]]:
    if trainer is None:
        return
    if names & {"optimizers", "param_groups"}:
        for number, optimizer in enumerate(getattr(trainer, "optimizers", [])):
            for place, group in enumerate(optimizer.param_groups):
                yield from ((f"{_OPTIMIZER}:{number}:{place}", name) for name in group if name != "params")
    if "trainer" not in names:
        return
    present, own = vars(trainer), names.difference(dir(type(trainer)))
    yield from ((_TRAINER, name) for name in own & {*present, *stored} if _is_state(present.get(name)))
    if any("callback" in name for name in names):
        for number, callback in enumerate(getattr(trainer, "callbacks", [])):
            if _is_users(type(callback)):
                yield from ((f"{_CALLBACK}:{number}", name) for name in _states(callback))
    if "datamodule" in names and trainer.datamodule is not None:
        yield from ((_DATA, name) for name in _states(trainer.datamodule))


def _states(owner: object) -> list[str]:
    return [name for name, value in (own_attributes(owner) or {}).items() if name != "trainer" and _is_state(value)]


def _is_state(value: Any) -> bool:
    return not isinstance(value, (*_NO_STATE, *_WRAPPERS, Tensor)) and not callable(value)


def _is_users(kind: type) -> bool:
    functions = (user_function(value) for value in vars(kind).values())
    return any(each is not None and is_user_code(each.__code__.co_filename) for each in functions)


def place_in_words(path: str, name: str) -> str:
    """The attribute in words: `the global variable STATE`."""
    kind = path.partition(":")[0]
    owner = {_GLOBAL: "the global variable ", _CLASS: "the class's ", _CLOSURE: "the variable ", _TRAINER: "trainer."}
    others = {_CALLBACK: "a callback's ", _DATA: "trainer.datamodule.", _OPTIMIZER: "an optimizer's "}
    return f"{(owner | others)[kind]}{name}"
