"""The shipped configuration files."""

from __future__ import annotations

from pathlib import Path


def config_folder() -> Path:
    """The folder of the shipped configs: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def groups() -> list[str]:
    """The names of the groups of configuration files."""
    return sorted(path.name for path in config_folder().iterdir() if path.is_dir())


def files(group: str) -> list[str]:
    """The names of the shipped files of a group."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))
