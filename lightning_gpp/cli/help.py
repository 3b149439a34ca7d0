"""The text of `--help`, which commands also print without arguments."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

import lightning_gpp
from lightning_gpp.option import Option, options_of
from lightning_gpp.training.options import Options

ASKED = ("--help", "-h")

VERSION = f"lightning-gpp {lightning_gpp.__version__}"

MAX_WIDTH = 100


def help_text(*, name: str, about: str, examples: Sequence[tuple[str, str]], folder: Path, config: str) -> str:
    """The help of a command.

    Args:
        name: name of the command.
        about: its description, in a sentence or two.
        examples: command lines with their purposes.
        folder: folder of the configuration files.
        config: the file that the command composes.
    """
    width = help_width()
    parts = [
        filled(about, width),
        f"Usage: {name} [GROUP=FILE ...] [KEY=VALUE ...]",
        "\n".join(["Examples:", *examples_text(examples, width)]),
        "\n".join(["Groups of configuration files; GROUP=FILE chooses one:", *_groups(folder, width)]),
        "\n".join([f"Keys of {name}:", *_keys(folder / f"{config}.yaml", width)]),
        "\n".join(["Keys of the strategy (strategy=gpp):", *_options(width)]),
        filled(
            f"{name} ... --cfg job prints the composed configuration, {name} --hydra-help the options of Hydra, which "
            "composes it. --config-dir=FOLDER adds configuration files of your own, and Python modules in the "
            "current folder can be imported.",
            width,
        ),
    ]
    return "\n\n".join(parts)


def _groups(folder: Path, width: int) -> Iterator[str]:
    for group in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from _entry(group.name, ", ".join(sorted(path.stem for path in group.glob("*.yaml"))), width)


def _keys(path: Path, width: int) -> Iterator[str]:
    """The keys of a configuration file with the comments behind them."""
    for key, value, comment in re.findall(r"^(\w+): (.*?) # (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        yield from _entry(f"{key}={value}", comment, width)


def _options(width: int) -> Iterator[str]:
    for option in options_of(Options):
        yield from _entry(f"strategy.{option.name}={_default(option)}", option.help, width)


def _default(option: Option) -> str:
    return str(yaml.safe_dump(option.default)).partition("\n")[0]


def _entry(title: str, text: str, width: int) -> list[str]:
    return [f"  {title}", textwrap.indent(filled(text, width - 6), " " * 6)]


def examples_text(examples: Sequence[tuple[str, str]], width: int | None = None) -> list[str]:
    """Command lines, each above its purpose."""
    return [line for example in examples for line in _entry(*example, width or help_width())]


def help_width() -> int:
    """Characters of a line: those of the terminal, as far as they are easy to read."""
    return min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns)


def filled(text: str, width: int | None = None) -> str:
    """The text in lines of this width, by default `help_width`."""
    return textwrap.fill(text, width or help_width(), break_long_words=False, break_on_hyphens=False)
