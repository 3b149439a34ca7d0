"""`gpp-checkpoint`: shows what is in a checkpoint, and converts between folders and files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_gpp.cli.help import parser_of, run_parsed
from lightning_gpp.errors import ConfigError

NAME = "gpp-checkpoint"

ABOUT = (
    "Shows and converts checkpoints. A checkpoint is a file, as plain Lightning writes it, or a folder, to which every "
    "process of a pipeline wrote its part (strategy.state_dict_type=sharded). Open only checkpoints that you trust: "
    "they are pickles."
)

EXAMPLES = (
    (
        "gpp-checkpoint show last.ckpt",
        "Epoch and step, size, the plan and the weight policy. Reads no tensors.",
    ),
    (
        "gpp-checkpoint convert last.ckpt plain.ckpt",
        "A folder becomes a file for plain Lightning, with the optimizer's state; a file becomes a folder. Needs "
        "memory for one tensor.",
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_parsed(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(NAME, ABOUT, EXAMPLES)
    tasks = parser.add_subparsers(required=True, metavar="show | convert")
    show = tasks.add_parser("show", help="print what is in a checkpoint")
    show.add_argument("path", metavar="PATH", help="a checkpoint, file or folder")
    show.set_defaults(task=_show)
    change = tasks.add_parser("convert", help="write a folder as a file, or a file as a folder")
    change.add_argument("source", metavar="SRC", help="a checkpoint, file or folder")
    change.add_argument("target", metavar="DST", help="the path of the new one, which must not exist")
    change.set_defaults(task=_convert)
    return parser


def _show(given: argparse.Namespace) -> None:
    from lightning_gpp.checkpoints.convert import contents  # takes a second to load, for which --help need not wait
    from lightning_gpp.reports.terminal import terminal_width, wrapped

    _check_there(given.path)
    described = contents(given.path)
    indent = max(map(len, described)) + 2
    for name, text in described.items():
        line = f"{name:<{indent}}{text}"
        print(line if "\n" in text else wrapped(line, terminal_width(), indent))


def _convert(given: argparse.Namespace) -> None:
    from lightning_gpp.checkpoints.convert import convert

    _check_there(given.source)
    if os.path.lexists(given.target):
        raise ConfigError(f"{given.target} exists already. Choose another name.")
    convert(given.source, given.target)
    print(f"{given.source} -> {given.target}")


def _check_there(path: str) -> None:
    if not Path(path).exists():
        raise ConfigError(f"{path} does not exist. Give a checkpoint: runs/<name>/<date_time>/checkpoints/....ckpt.")


if __name__ == "__main__":
    main()
