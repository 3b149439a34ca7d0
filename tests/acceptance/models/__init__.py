"""The zoo: architectures of many libraries and idioms, small, built from their configurations, without downloads.

Each entry is a function that returns a module with a `training_step`, and a mini-batch of it.
"""

from __future__ import annotations

from importlib import import_module

from tests.acceptance.models.base import Entry

_FILES = ("text", "vision", "audio_video", "multimodal", "libraries", "idioms", "recurrent", "batches")


def zoo() -> dict[str, Entry]:
    """All entries by name; those of libraries that are not installed fail with an ImportError when they are built."""
    entries: dict[str, Entry] = {}
    for file in _FILES:
        entries |= import_module(f"tests.acceptance.models.{file}").MODELS
    return entries
