"""Writes configs/strategy/gpp.yaml from the options of the strategy: `python -m lightning_gpp.cli.strategy_file`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import yaml

from lightning_gpp.config_files import config_folder
from lightning_gpp.option import Option, options_of
from lightning_gpp.training.options import Options

_WIDTH = 120

_HEAD = """\
# Graph pipeline parallelism. Every key is an argument of lightning_gpp.GPPStrategy.
# This file is written by `python -m lightning_gpp.cli.strategy_file` from lightning_gpp/training/options.py.

_target_: lightning_gpp.strategy.GPPStrategy
_convert_: all
"""


def strategy_yaml() -> str:
    """The text of the file: every option with its default, under a comment that explains it."""
    return "\n".join([_HEAD, *(line for definition in options_of(Options) for line in _lines(definition))])


def _lines(definition: Option) -> Iterator[str]:
    if definition.section:
        yield f"# -- {definition.section} ".ljust(_WIDTH, "-")
        yield ""
    yield from comment(definition.help)
    yield yaml.safe_dump({definition.name: definition.default})


def comment(text: str) -> list[str]:
    """The text as lines of a comment, with a capital."""
    text = text[0].upper() + text[1:]
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


if __name__ == "__main__":
    (config_folder() / "strategy" / "gpp.yaml").write_text(strategy_yaml())
