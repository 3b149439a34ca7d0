"""The store of measured blocks: one JSON file per kind of device and version of PyTorch."""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from lightning_gpp.costs.measured import MeasuredSeconds

FORMAT: Final = 2

BlockKey = tuple[str, int]
"""The content of a block, and the samples of its micro-batch."""

EMPTY: Final[BlockKey] = "empty", 1
"""A block without operators. What running it again takes is part of running any block again."""


def default_folder() -> Path:
    """`lightning-gpp` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-gpp"


class Store:
    """Measured seconds of blocks on one kind of device.

    Args:
        folder: folder of the file; it need not exist.
        device: description of the kind of device, with everything that determines its speed.
    """

    def __init__(self, folder: str | Path, device: str) -> None:
        self.device = device
        name = re.sub(r"[^A-Za-z0-9]+", "-", f"{device} torch {torch.__version__}").strip("-").lower()
        self.path = Path(folder) / f"costs-{name}.json"
        self.figures: dict[BlockKey, MeasuredSeconds] = self._read(warn=True)

    def save(self) -> None:
        """Write the figures, merged with those that other processes have written; warn if that is impossible."""
        figures = {**self._read(warn=False), **self.figures}
        blocks: dict[str, dict[str, list[float]]] = {}
        for (content, size), seconds in sorted(figures.items()):
            blocks.setdefault(content, {})[str(size)] = list(seconds)
        text = json.dumps({**self._header(), "blocks": blocks}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".json", delete=False) as file:
                file.write(text)
            os.replace(file.name, self.path)
        except OSError as error:
            warnings.warn(
                f"Measured costs cannot be kept in {self.path}: {error}. The next run measures again; set "
                "XDG_CACHE_HOME to a folder that can be written to.",
                stacklevel=2,
            )

    def _header(self) -> dict[str, Any]:
        return {"format": FORMAT, "device": self.device, "torch": torch.__version__}

    def _read(self, *, warn: bool) -> dict[BlockKey, MeasuredSeconds]:
        try:
            content = json.loads(self.path.read_text())
            if {key: content[key] for key in self._header()} != self._header():
                return {}
            return {
                (block, int(size)): _checked(values)
                for block, sizes in content["blocks"].items()
                for size, values in sizes.items()
            }
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if warn:
                warnings.warn(
                    f"The cache of measured costs {self.path} is damaged ({type(error).__name__}: {error}). All blocks "
                    "are measured again, and the file is rewritten.",
                    stacklevel=3,
                )
            return {}


def _checked(values: list[float]) -> MeasuredSeconds:
    seconds = MeasuredSeconds(*map(float, values))
    if len(values) != len(seconds) or not all(0 <= value < float("inf") for value in seconds):
        raise ValueError(f"{values} are not seconds of forward, input gradient, weight gradient and repetition")
    return seconds
