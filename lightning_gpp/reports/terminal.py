"""Text on a terminal: its width, and the colours of stages. Pipes and files get the text alone."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import Final

from rich.console import Console
from rich.style import Style
from rich.text import Text

from lightning_gpp.plan import Plan
from lightning_gpp.reports.palette import stage_color, tint
from lightning_gpp.schedules import Kind

PIPE: Final = 100
"""Characters of a line if there is no terminal, and COLUMNS is not set."""

NARROWEST: Final = 60

_JOINT: Final = "\N{NO-BREAK SPACE}"

_BAR: Final = re.compile(r"^ *device (\d+) \|(.*)\|", re.MULTILINE)
_ACTION: Final = re.compile(rf"(\d+)?([{''.join(kind.value for kind in Kind)}])(\d+)?=*")
_FULL: Final = (Kind.BACKWARD.value, Kind.INPUT.value, Kind.WEIGHT.value)


def terminal_width() -> int:
    """Characters of a line: COLUMNS, or those of the terminal."""
    return max(NARROWEST, shutil.get_terminal_size((PIPE, 24)).columns)


def together(text: str) -> str:
    """The text as one word for `wrapped`."""
    return text.replace(" ", _JOINT)


def wrapped(line: str, width: int, indent: int = 4) -> str:
    """The line, broken between words, but not before a per cent sign; further lines are indented."""
    line = line.replace(" %", f"{_JOINT}%")
    lines = textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace(_JOINT, " ")


def show(text: str, plan: Plan) -> None:
    """Print a text about a plan; on a terminal, names of stages and bars of timelines have the colours of stages."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        print(text)
        return
    console.print(colored(text, plan), soft_wrap=True)


def colored(text: str, plan: Plan) -> Text:
    """The text with the colours of the plan's stages."""
    result = Text(text)
    for stage, entry in enumerate(plan.stages):
        name = re.escape(entry.name)
        result.highlight_regex(rf"(?<![\w./+-])({stage} )?{name}(?![\w./+-])", Style(color=stage_color(stage)))
    for row in _BAR.finditer(text):
        _color_bar(result, row, plan.stages_on(int(row[1])) if int(row[1]) < plan.num_devices else ())
    return result


def _color_bar(text: Text, row: re.Match[str], stages: tuple[int, ...]) -> None:
    """Dark text on the colours of the actions' stages. A bar without numbers of stages is that of a single one."""
    for action in _ACTION.finditer(row[2]):
        if action[1] is None and len(stages) != 1:
            continue
        color = stage_color(int(action[1] or stages[0]))
        paint = Style(color="#111111", bgcolor=color if action[2] in _FULL else tint(color))
        text.stylize(paint, row.start(2) + action.start(), row.start(2) + action.end())
