"""Checks values against types; messages name the place, the key, the value and the allowed values."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lightning_gpp.errors import GPPError, did_you_mean

Checked = TypeVar("Checked")

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


def shown(value: object) -> str:
    """The value as code, shortened if it is long or nested."""
    return _SHOWN.repr(value)


def validated(
    kind: Callable[..., Checked],
    content: object,
    *,
    error: type[GPPError],
    place: str = "",
    key: str = "",
    remedy: str = "",
) -> Checked:
    """The content of a file or setting as a dataclass, all types and keys of which it must have.

    Args:
        kind: a dataclass, whose fields may be dataclasses.
        content: mappings, lists and scalars, as YAML and JSON have them.
        error: type of the error to raise.
        place: the file that the content is from; messages begin with it.
        key: the key whose value the content is; it leads the keys that messages name.
        remedy: a sentence that ends messages.

    Raises:
        GPPError: of the type `error`, with the key, its value and what is allowed.
    """
    try:  # as JSON: with strict types it has lists for tuples and mappings for dataclasses, Python's values do not
        checked: Checked = _wrapped(kind).validate_json(json.dumps([content], default=repr))[0]
        return checked
    except ValidationError as failure:
        problem = _problem(kind, content, key, failure)
    except GPPError as failure:  # of a dataclass that checks itself
        raise type(failure)(": ".join(filter(None, (place, key, str(failure))))) from None
    raise error(" ".join(filter(None, (place and f"{place}:", problem, remedy))))


@cache
def _wrapped(kind: Any) -> TypeAdapter[Any]:
    """The type in a tuple, which passes its configuration on to dataclasses; dataclasses take none themselves."""
    return TypeAdapter(tuple[kind], config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def _problem(kind: Any, content: object, root: str, failure: ValidationError) -> str:
    """The deepest of the errors in words; of equally deep ones an unknown key first, a missing key last.

    Errors at the same key are those of alternative types.
    """
    errors = [(_path(content, error["loc"][1:]), error) for error in failure.errors()]
    path, first = max(errors, key=lambda item: (len(item[0]), item[1]["type"] == _UNKNOWN, item[1]["type"] != _MISSING))
    key = _written(root, path)
    if content is None and not key:
        return "the file is empty."
    if first["type"] == _UNKNOWN:
        return f"{key} is not a key.{did_you_mean(path[-1], _keys(kind, path[:-1]))}"
    if first["type"] == _MISSING:
        return f"{key} is missing."
    allowed = in_words(error for other, error in errors if other == path)
    return f"{key or 'the content'} is {shown(_value(content, path))}; it must be {allowed}."


_UNKNOWN, _MISSING = "unexpected_keyword_argument", "missing"


def _path(content: Any, location: Sequence[int | str]) -> tuple[int | str, ...]:
    """The keys that lead to an error, without the names of alternative types that pydantic adds."""
    path: list[int | str] = []
    for index, step in enumerate(location):
        last = index == len(location) - 1
        if isinstance(content, Mapping) and (step in content or last):
            content = content.get(step)
        elif isinstance(content, list | tuple) and isinstance(step, int) and (step < len(content) or last):
            content = content[step] if step < len(content) else None
        else:
            continue
        path.append(step)
    return tuple(path)


def _value(content: Any, path: Sequence[int | str]) -> Any:
    for step in path:
        content = content[step]
    return content


def _written(root: str, path: Sequence[int | str]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join((root, *steps)).removeprefix(".")


def _keys(kind: Any, path: Sequence[int | str]) -> list[str]:
    """The keys of the dataclass at a path below `kind`."""
    for step in path:
        owner = _dataclass_in(kind)
        if isinstance(step, str) and owner is not None:
            kind = get_type_hints(owner)[step]
        else:
            kind = next(item for item in get_args(kind) if item not in (str, ..., type(None)))
    owner = _dataclass_in(kind)
    return [] if owner is None else [field.name for field in fields(owner)]


def _dataclass_in(kind: Any) -> Any:
    """The dataclass among a type and its alternatives."""
    return next((item for item in (kind, *get_args(kind)) if isinstance(item, type) and is_dataclass(item)), None)


_WORDS: Final = {
    "Input should be ": "",
    "an object": "a mapping",
    "a valid array": "a list",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "None": "null",
}
"""Words of pydantic, and of people who write YAML and Python."""


def in_words(errors: Iterable[Any]) -> str:
    """The values that are allowed where pydantic found these errors, each a mapping."""
    words = ", or ".join(dict.fromkeys(str(error["msg"]) for error in errors))
    for theirs, ours in _WORDS.items():
        words = words.replace(theirs, ours)
    return words
