"""The README as it is shown outside of the repository, such as on PyPI, where relative links lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def outside(text: str, repository: str | None) -> str:
    """The text with relative links and pictures at an address, or without an address as words alone."""

    def there(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        if repository is None:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(there, text)


class Readme(MetadataHookInterface):
    """Links of the README begin with `Repository` of [project.urls], where there is one."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": outside(text, repository)}
