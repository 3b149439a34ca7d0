"""Values of a JSON file that know where they stand, so that errors can say it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from lightning_gpp.errors import PlanError


@dataclass(frozen=True, slots=True)
class Located:
    """A value and the keys that lead to it."""

    value: Any
    file: str
    key: str = ""

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def __getitem__(self, key: str) -> Located:
        """Raises PlanError where this is no object, or has no such key."""
        path = f"{self.key}.{key}" if self.key else key
        if not isinstance(self.value, dict):
            raise self.error("must be an object (curly brackets)")
        if key not in self.value:
            raise PlanError(f"{self.file}: {path} is missing. Add it, or check that the file is complete.")
        return Located(self.value[key], self.file, path)

    def __iter__(self) -> Iterator[Located]:
        if not isinstance(self.value, list):
            raise self.error("must be a list (square brackets)")
        for index, value in enumerate(self.value):
            yield Located(value, self.file, f"{self.key}[{index}]")

    def entries(self) -> Iterator[Located]:
        """Of an object, in its order."""
        if not isinstance(self.value, dict):
            raise self.error("must be an object (curly brackets)")
        yield from (self[key] for key in self.value)

    def number(self) -> float:
        """A finite number that is not negative."""
        if isinstance(self.value, int | float) and self.value < 0:
            raise self.error("must be a number that is not below 0")
        return self.finite()

    def finite(self) -> float:
        """A number that is neither infinite nor NaN."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.error("must be a number")
        return float(value)

    def integer(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.error("must be a whole number")
        return self.value

    def flag(self) -> bool:
        if self.value not in (0, 1):
            raise self.error("must be true, false, 0 or 1")
        return bool(self.value)

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.error("must be text")
        return self.value

    def error(self, remedy: str) -> PlanError:
        shown = repr(self.value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return PlanError(f"{self.file}: {self.key or 'the content'} {remedy}, but is {shown}.")


def load(path: str | Path) -> Located:
    """The content of a JSON file.

    Raises:
        PlanError: the file cannot be read, or is not JSON.
    """
    try:
        return Located(json.loads(Path(path).read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}). Give the path of a JSON file.") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: is not JSON ({error}). Give a file that holds one JSON object.") from error
