"""The files beside the package that say how to cite it and how to put it into a container agree with pyproject.toml."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_gpp
from tests.pages import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

RECIPES = {"Dockerfile": r"(?m)^COPY (.*) \S+$", "lightning_gpp.def": r"(?m)^    (?!cd )(\S+) /src\S*$"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_citation_is_of_this_release(project: dict[str, Any]) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format requires
    assert citation["version"] == lightning_gpp.__version__
    assert citation["license"] == project["project"]["license"]


@pytest.mark.parametrize(("name", "copied"), RECIPES.items())
def test_recipes_of_containers_copy_what_a_wheel_is_built_of(name: str, copied: str, project: dict[str, Any]) -> None:
    recipe = (ROOT / "examples" / "containers" / name).read_text()
    paths = [Path(path) for group in re.findall(copied, recipe) for path in group.split()]
    assert all((ROOT / path).exists() for path in paths)
    build = project["tool"]["hatch"]
    wheel = build["build"]["targets"]["wheel"]
    fragments = [each["path"] for each in build["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]]
    needed = ["pyproject.toml", *fragments, *project["project"]["license-files"], *wheel["packages"]]
    for path in map(Path, [*needed, *wheel["force-include"]]):
        assert {path, *path.parents} & {*paths}, f"{path} is not copied"
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', recipe)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
