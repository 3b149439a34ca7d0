"""Reads the files of users, plans and clusters in YAML, with one-sentence errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from lightning_gpp.errors import GPPError


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # PyYAML has no types
    """The safe loader of YAML, for which 1e9 is a number and 2024-01-01 is text; YAML 1.1 has it the other way."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse keys that occur twice, of which YAML's loader takes the last without a word."""
        names = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
            names.add(key.value)
        content: dict[Any, Any] = super().construct_mapping(node, deep)
        return content


_EXPONENT: Final = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")

_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def with_numbers(content: Any) -> Any:
    """The content with numbers in place of strings such as "1e9", which other loaders of YAML keep."""
    if isinstance(content, Mapping):
        return {key: with_numbers(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [with_numbers(value) for value in content]
    return float(content) if isinstance(content, str) and _EXPONENT.match(content) else content


def read_yaml(path: str | Path, *, error: type[GPPError], place: str = "") -> Any:
    """The content of a YAML file, or of a JSON file. `place` is the beginning of messages, by default the path.

    Raises:
        GPPError: of the type `error`; the file cannot be read, or is not YAML.
    """
    place = place or str(path)
    text = _read(path, error, place)
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as failure:
        raise error(f"{place}: is not YAML that can be read: {_one_line(failure)}.") from failure


def _read(path: str | Path, error: type[GPPError], place: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # editors of Windows put a mark in front
    except OSError as failure:
        raise error(f"{place}: cannot be read: {failure.strerror}.") from failure
    except UnicodeDecodeError as failure:
        raise error(f"{place}: is not text in UTF-8, see byte {failure.start}. Save it in this encoding.") from failure


def _one_line(failure: Exception) -> str:
    return " ".join(str(failure).replace('in "<unicode string>", ', "in ").split()).rstrip(".")
