"""The text of `--help`, which commands also print without arguments; the parts of commands that do not use Hydra."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

import yaml

import lightning_gpp
from lightning_gpp.config_files import config_folder, files, groups
from lightning_gpp.errors import GPPError
from lightning_gpp.option import options_of
from lightning_gpp.training.options import Options

ASKED = ("--help", "-h")

VERSION = f"lightning-gpp {lightning_gpp.__version__}"

MAX_WIDTH = 100


def help_text(name: str, about: str, examples: Sequence[tuple[str, str]], config: str) -> str:
    """The help of a command: its description, examples, groups of files, keys, and options of the strategy.

    Args:
        name: name of the command.
        about: its description, in a sentence or two.
        examples: command lines with their purposes.
        config: the file that the command composes.
    """
    parts = [
        filled(about),
        f"Usage: {name} [GROUP=FILE ...] [KEY=VALUE ...]",
        entries("Examples:", examples),
        entries(
            "Groups of configuration files; GROUP=FILE chooses one:",
            ((group, ", ".join(files(group))) for group in groups()),
        ),
        entries(f"Keys of {name}:", _keys(config)),
        entries("Keys of the strategy (strategy=gpp):", _options()),
        filled(
            f"{name} ... --cfg job prints the composed configuration, {name} --hydra-help the options of Hydra, which "
            "composes it. --config-dir=FOLDER adds configuration files of your own, and Python modules in the "
            "current folder can be imported."
        ),
    ]
    return "\n\n".join(parts)


def _keys(config: str) -> Iterator[tuple[str, str]]:
    """The keys of a configuration file with the comments behind them."""
    text = (config_folder() / f"{config}.yaml").read_text(encoding="utf-8")
    for key, value, comment in re.findall(r"^(\w+): (.*?) # (.*)$", text, re.MULTILINE):
        yield f"{key}={value}", comment


def _options() -> Iterator[tuple[str, str]]:
    for option in options_of(Options):
        default = str(yaml.safe_dump(option.default)).partition("\n")[0]
        yield f"strategy.{option.name}={default}", option.help


def entries(heading: str, pairs: Sequence[tuple[str, str]] | Iterator[tuple[str, str]]) -> str:
    """A list of titles, each above its text."""
    lines = (f"  {title}\n{textwrap.indent(filled(text, 6), ' ' * 6)}" for title, text in pairs)
    return "\n".join([heading, *lines])


def filled(text: str, less: int = 0) -> str:
    """The text in lines of the terminal, as far as they are easy to read, or `less` characters."""
    width = min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns) - less
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def parser_of(name: str, about: str, examples: Sequence[tuple[str, str]]) -> argparse.ArgumentParser:
    """The parser of a command with this help."""
    form, epilog = argparse.RawDescriptionHelpFormatter, entries("Examples:", examples)
    parser = argparse.ArgumentParser(name, description=filled(about), epilog=epilog, formatter_class=form)
    parser.add_argument("--version", action="version", version=VERSION)
    return parser


def run_parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
    """Run the `task` of a command line; a user's mistake ends it without a traceback."""
    given = parser.parse_args(arguments)
    try:
        given.task(given)
    except (GPPError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(1)
