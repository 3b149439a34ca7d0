"""Options of the strategy: each is defined once, as a field of a dataclass, and everything else derives from it.

The field's type, default, help text and allowed values become an argument of `GPPStrategy` and its documentation, a
typed key of the configuration with a comment, a line of the commands' help, and the check of what a user gives.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lightning_gpp.errors import ConfigError, close_to, did_you_mean
from lightning_gpp.validation import in_words, shown

Given = TypeVar("Given", contravariant=True)
Kept = TypeVar("Kept", covariant=True)
Self = TypeVar("Self")
Made = TypeVar("Made")
Arguments = ParamSpec("Arguments")


class Converted(Protocol[Given, Kept]):
    """The type, for type checkers, of an option that is given in one form and kept in another."""

    def __get__(self, instance: object, owner: Any = None, /) -> Kept: ...

    def __set__(self, instance: object, value: Given, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The definition of one option.

    Args:
        name: name of the argument and of the configuration's key.
        kind: type of the values that a user may give.
        default: default of the argument.
        help: what the option does; one text for the documentation of the argument and the comment of the key.
        section: heading of this option and those after it.
        allowed: the allowed values in words; by default those of pydantic.
        convert: converts a given value to the kept one, or raises GPPError if it is not allowed; without it a value is
            checked against the type.
    """

    name: str
    kind: Any
    default: Any
    help: str
    section: str
    allowed: str
    convert: Callable[[Any], Any] | None

    def keep(self, value: Any) -> Any:
        """The checked value in the form in which it is kept.

        Raises:
            ConfigError: the value is not allowed.
        """
        if self.convert is not None:
            return self.convert(value)
        try:  # without any conversion: 1 is no bool, "1" no int
            _adapter(self.kind).validate_python(value)
        except ValidationError as error:
            raise refusal(self.name, value, self.allowed or in_words(error.errors())) from None
        return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def refusal(name: str, value: object, allowed: str) -> ConfigError:
    """The error for a value of an option that is not allowed."""
    return ConfigError(f"strategy.{name} is {shown(value)}; it must be {allowed}.")


Problems = Mapping[str, tuple[bool, str]]
"""Pairs by option: True if it is given as it does not go together with something, and the reason.

A remedy follows the reason after ". Use ": another value of the option, or another setting (`strategy.sharding=zero1`).
"""


def refuse_beside(beside: str, options: Any, problems: Problems) -> None:
    """Raise ConfigError for the first of these options that does not go together with something."""
    for name, (given, reason) in problems.items():
        if given:
            value = shown(getattr(options, name))
            why, _, other = reason.partition(". Use ")
            setting = other if other.startswith("strategy.") else f"strategy.{name}={other}"
            remedy = f" Use {setting}." if other else ""
            raise ConfigError(f"strategy.{name}={value} does not go together with {beside}: it {why}.{remedy}")


def option(
    default: Any, help: str, *, section: str = "", allowed: str = "", convert: Callable[[Any], Any] | None = None
) -> Any:
    """Define an option as the field of a dataclass; the arguments are those of `Option`."""
    definition = {"help": help, "section": section, "allowed": allowed, "convert": convert}
    return field(default=default, metadata=definition)


def options_of(owner: type) -> tuple[Option, ...]:
    """The options of a dataclass: its own in their order, then those that it inherits."""
    kinds = get_type_hints(owner, include_extras=True)
    names = dict.fromkeys(name for each in owner.__mro__ for name in inspect.get_annotations(each))
    entries = {entry.name: entry for entry in fields(owner) if "help" in entry.metadata}
    return tuple(
        _definition(name, kinds[name], entries[name].default, entries[name].metadata)
        for name in names
        if name in entries
    )


def _definition(name: str, kind: Any, default: Any, metadata: Mapping[str, Any]) -> Option:
    return Option(**{"name": name, "kind": _given(kind), "default": default, **metadata})


def _given(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Converted else kind


def settle(instance: object) -> None:
    """Check all options of a new instance, and convert them to the forms in which they are kept.

    Raises:
        ConfigError: a value is not allowed.
    """
    for definition in options_of(type(instance)):
        object.__setattr__(instance, definition.name, definition.keep(getattr(instance, definition.name)))


def takes_fields_of(
    made: Callable[Arguments, Made],
) -> Callable[[Callable[[Self, Made], None]], Callable[Concatenate[Self, Arguments], None]]:
    """Turn `__init__(self, options)` into one with the fields of a dataclass as its arguments.

    Type checkers, editors and `inspect.signature` see the arguments with their types and defaults.
    """

    def decorate(init: Callable[[Self, Made], None]) -> Callable[Concatenate[Self, Arguments], None]:
        @wraps(init)
        def constructor(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            _check_names(type(self).__name__, parameters, args, kwargs)
            init(self, made(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = _parameters(made)
        signature = inspect.Signature([own, *parameters], return_annotation=None)
        constructor.__signature__ = signature  # type: ignore[attr-defined]
        return constructor

    return decorate


def _check_names(
    owner: str, parameters: Sequence[inspect.Parameter], args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    if args:
        raise ConfigError(f"{owner} takes its options by name, as in {owner}(schedule='1f1b'); got {shown(args[0])}.")
    known = [parameter.name for parameter in parameters]
    for name in kwargs:
        if name not in known:
            guess = did_you_mean(name, known) if close_to(name, known) else " Leave it out (docs/reference/options.md)."
            raise ConfigError(f"{owner} has no option {name!r}.{guess}")


def _parameters(made: Any) -> list[inspect.Parameter]:
    kinds = get_type_hints(made)
    parameters = inspect.signature(made).parameters.values()
    return [parameter.replace(annotation=_given(kinds[parameter.name])) for parameter in parameters]


def documents(owner: type) -> Callable[[type[Made]], type[Made]]:
    """Add the options of `owner` to the docstring of a class that takes them, as its arguments."""

    def decorate(documented: type[Made]) -> type[Made]:
        text, raises, errors = (inspect.getdoc(documented) or "").partition("Raises:")
        documented.__doc__ = f"{text}{arguments_text(owner)}\n\n{raises}{errors}"
        return documented

    return decorate


def arguments_text(owner: type, width: int = 116) -> str:
    """The section `Args` of a docstring, with all options of a dataclass."""
    wrapped = (
        textwrap.fill(
            f"{definition.name}: {definition.help}",
            width,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
        )
        for definition in options_of(owner)
    )
    return "\n".join(["Args:", *wrapped])
