"""Values checked against types; messages name the place, the value and what is allowed there."""

from __future__ import annotations

import reprlib
from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


def shown(value: object) -> str:
    """The value as code, shortened where it is long or nested."""
    return _SHOWN.repr(value)


def conforms(value: object, kind: Any) -> bool:
    """Whether a value is of a type, without any conversion: 1 is no bool, "1" no int."""
    try:
        _adapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
