"""Screenshots of the report, and of the terminal at 80 columns: docs/pictures/*.png.

python -m benchmarks.screenshots

Needs a browser: `pip install ".[browser]"`, and `playwright install chromium` or a Chromium of the system.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
from rich.text import Text

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"
PLAN: Final = ("-m", "lightning_gpp.cli.plan", "experiment=two_tower", "report=report.html")
COLUMNS: Final = 80
WIDTHS: Final = (1280, 390)
SCHEMES: Final = ("light", "dark")


class NoBrowserError(RuntimeError):
    """There is no browser on this machine, or playwright is not installed."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser: playwright's own, or else that of the system.

    Raises:
        NoBrowserError: there is neither.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise NoBrowserError('needs a browser: pip install ".[browser]"') from error
    with sync_playwright() as started:
        own = Path(started.chromium.executable_path)
        path = str(own) if own.exists() else shutil.which("chromium") or shutil.which("google-chrome")
        if path is None:
            raise NoBrowserError("needs a browser: playwright install chromium")
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []  # which root cannot have
        browser = started.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def planned(folder: Path) -> str:
    """Write `report.html` into a folder; returns what a terminal of 80 columns shows, with its colours."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm"}
    command = [sys.executable, *PLAN]
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


_TERMINAL: Final = """<style>
body {{ margin: 16px; width: max-content; color: {foreground}; background: {background}; }}
pre {{ font: 13px/1.35 monospace; margin: 0; }}
{stylesheet}
</style><pre>{code}</pre>"""


def terminal_page(text: str, scheme: str) -> str:
    """A terminal with the text as a page."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(text), soft_wrap=True)
    theme = DEFAULT_TERMINAL_THEME if scheme == "light" else MONOKAI
    return console.export_html(theme=theme, code_format=_TERMINAL)


def shoot(browser: Any, page: Path, width: int, scheme: str, target: Path) -> None:
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.goto(page.as_uri())
    opened.screenshot(path=target, full_page=True)
    opened.close()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDirectory() as name, chromium() as browser:
        folder = Path(name)
        text = planned(folder)
        for scheme in SCHEMES:
            for width in WIDTHS:
                shoot(browser, folder / "report.html", width, scheme, FOLDER / f"report_{width}_{scheme}.png")
            page = folder / f"terminal_{scheme}.html"
            page.write_text(terminal_page(text, scheme))
            shoot(browser, page, 680, scheme, FOLDER / f"terminal_{COLUMNS}_{scheme}.png")


if __name__ == "__main__":
    main()
