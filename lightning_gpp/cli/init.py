"""`gpp-init`: writes a starter project, which is a copy of `examples/starter` under another name."""

from __future__ import annotations

import argparse
import keyword
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from lightning_gpp.cli.help import parser_of, run_parsed
from lightning_gpp.errors import ConfigError

NAME = "starter"
"""The name of the copied project, in the names of its files and in their text."""

LEFT_OUT = ("runs", "__pycache__", ".pytest_cache")


_ABOUT = (
    "Writes a project that trains at once: a LightningModule with two towers, made-up data, their configuration, a "
    "test, and a script for SLURM. Replace the network and the data by yours."
)


def main() -> None:
    parser = parser_of("gpp-init", _ABOUT, [("gpp-init my_project", "A new folder my_project.")])
    parser.add_argument("name", help="name of the project: of its folder, its Python package and its experiment")
    parser.set_defaults(task=_create)
    run_parsed(parser, None)


def _create(given: argparse.Namespace) -> None:
    folder = create(given.name, Path.cwd())
    train = f"gpp-train experiment={folder.name}"
    print(f"{folder}/ is a project that trains: cd {folder.name} && {train}\nIts README.md tells what is where.")


def create(name: str, parent: Path) -> Path:
    """Write the project into a new folder `parent/name`, and return the folder.

    Raises:
        ConfigError: the name cannot be that of a Python package, an installed one has it, or the folder exists.
    """
    is_name = name.isidentifier() and name.isascii()  # Hydra reads ASCII letters only
    if not is_name or keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise ConfigError(
            f"{name!r} cannot be the name of a Python package and of an experiment. Choose one such as my_project."
        )
    folder = parent / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already. Choose another name.")
    if find_spec(name) is not None:
        raise ConfigError(
            f"{name!r} is the name of an installed package, which the project would hide. Choose another."
        )
    source = _template()
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        relative = path.relative_to(source)
        if not set(LEFT_OUT) & set(relative.parts):
            target = folder / str(relative).replace(NAME, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text(encoding="utf-8").replace(NAME, name), encoding="utf-8")
            shutil.copymode(path, target)
    return folder


def _template() -> Path:
    """The folder of the copied project: inside an installed package, among the examples of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / NAME
    return installed if installed.is_dir() else package.parent / "examples" / NAME


if __name__ == "__main__":
    main()
