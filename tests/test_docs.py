"""Every path, module, link and option that the documentation names exists, and its Python can be read."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import lightning_gpp
from lightning_gpp.cluster import load_cluster
from lightning_gpp.option import options_of
from lightning_gpp.plan import Plan
from lightning_gpp.planning.problem.partitioner import PARTITIONERS
from lightning_gpp.registry import Registry
from lightning_gpp.runtime.weights.policy import WEIGHT_POLICIES
from lightning_gpp.schedules.registry import SCHEDULES
from lightning_gpp.training.options import Options
from tests.pages import DOCS, ROOT, SITE, blocks

PACKAGE = ROOT / "lightning_gpp"
PAGES = [ROOT / "README.md", *SITE, *sorted((ROOT / "benchmarks").rglob("*.md"))]
ROOMS = sorted(
    path.name for folder in (ROOT, PACKAGE) for path in folder.iterdir() if path.is_dir() and path.name != "runs"
)

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PYTHON_FILE = re.compile(r"(?<![\w/.*<-])((?:\w+/)*\w+\.py)\b")
IN_A_ROOM = re.compile(rf"(?<![\w/.*<~-])((?:{'|'.join(map(re.escape, ROOMS))})/[\w/.-]*\w/?)(?![\w*<])")
MODULE = re.compile(r"(?:python -m |from |import )((?:lightning_gpp|benchmarks|gpp_examples|tests)(?:\.\w+)*)")
EXAMPLES = {"train.py", "evaluate.py", "tests/test_training.py"}
"""Files of a reader, beside those of `my_project`."""

REGISTRIES: tuple[Registry[Any], ...] = (SCHEDULES, PARTITIONERS, WEIGHT_POLICIES)
STRATEGIES = {"GPPStrategy", "GPPFabricStrategy", "Options"}


def is_there(path: str) -> bool:
    """Paths are those of the repository, or of the package."""
    return path in EXAMPLES or "my_project" in path or any((folder / path).exists() for folder in (ROOT, PACKAGE))


each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@each_page
def test_paths_exist(page: Path) -> None:
    text = page.read_text()
    paths = {*PYTHON_FILE.findall(text), *IN_A_ROOM.findall(LINK.sub("]", text))}
    assert not [path for path in sorted(paths) if not is_there(path)]


@each_page
def test_links_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not [name for name in sorted(set(MODULE.findall(text))) if importlib.util.find_spec(name) is None]


@each_page
def test_python_names_options_and_public_names(page: Path) -> None:
    """What is on no page as a script of its own can be read at least, and calls the strategy as it is."""
    known = {definition.name for definition in options_of(Options)}
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(code))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STRATEGIES:
                assert {keyword.arg for keyword in node.keywords if keyword.arg} <= known
            if isinstance(node, ast.ImportFrom) and node.module == "lightning_gpp":
                assert {alias.name for alias in node.names} <= {*lightning_gpp.__all__, "sequence"}


EXTENSIONS = [
    (page, code)
    for page in SITE
    for code in blocks(page, "python")
    if re.search(r"(?m)^@register_", code) and page.name != "python.md"
]
"""Schedules, partitioners and policies of one's own; those of the page of the public interface run with it."""


@pytest.mark.parametrize(("page", "code"), EXTENSIONS, ids=[page.stem for page, _ in EXTENSIONS])
def test_extensions_can_be_registered(page: Path, code: str) -> None:
    before = [dict(registry.entries) for registry in REGISTRIES]
    for registry in REGISTRIES:
        registry.entries.clear()  # another test may have registered the same
    try:
        exec(code, {"__name__": page.stem})
        assert sum(len(registry.entries) for registry in REGISTRIES) == 1
    finally:
        for registry, entries in zip(REGISTRIES, before, strict=True):
            registry.entries.clear()
            registry.entries.update(entries)


def test_clusters_on_pages_can_be_read(tmp_path: Path) -> None:
    codes = [code for page in SITE for code in blocks(page, "yaml") if re.search(r"(?m)^(nodes|preset):", code)]
    assert len(codes) >= 2
    for code in codes:
        (tmp_path / "cluster.yaml").write_text(code)
        assert load_cluster(tmp_path / "cluster.yaml").devices


def inline_options() -> Iterator[tuple[Path, str]]:
    for page in (ROOT / "README.md", *SITE):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        yield from ((page, name) for name in re.findall(r"strategy\.(\w+)=", text))


def test_options_in_sentences_exist() -> None:
    known = {definition.name for definition in options_of(Options)}
    assert {(str(page), name) for page, name in inline_options() if name not in known} == set()


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_options_has_them_all(hooks: ModuleType) -> None:
    page = hooks.expanded((DOCS / "reference/options.md").read_text(), "reference/options.md")
    assert re.findall(r"(?m)^### (\w+)$", page) == [definition.name for definition in options_of(Options)]
    assert "Allowed: ." not in page
    assert "(../howto/cuda_graphs.md#branches-at-the-same-time)" in page
    links = re.findall(r"\]\((\.\./[\w/]+\.md)[)#]", page)
    assert links
    assert all((DOCS / "reference" / link).exists() for link in links)


def test_the_page_of_schedules_has_them_all() -> None:
    table = (DOCS / "reference/schedules.md").read_text().partition("## Which one")[2].partition("**Layouts.**")[0]
    named = {name for row in re.findall(r"(?m)^\| (`.*?) \|", table) for name in re.findall(r"`(\w+)`", row)}
    assert named == {
        name for name, method in SCHEDULES.entries.items() if method.generate.__module__.startswith("lightning_gpp")
    }


def test_links_that_leave_the_site_become_text(hooks: ModuleType) -> None:
    text = hooks.expanded("[a](../../configs) [b](../howto/lora.md)", "reference/options.md")
    assert text == "a [b](../howto/lora.md)"


def test_the_smallest_plan_is_valid(tmp_path: Path) -> None:
    (text,) = blocks(DOCS / "reference/plan_file.md", "yaml")
    (tmp_path / "plan.yaml").write_text(text)
    assert len(Plan.load(tmp_path / "plan.yaml").stages) == 3


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w/]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in SITE)


def test_pages_that_code_names_exist() -> None:
    for folder in ("lightning_gpp", "configs", "examples", "tests", "benchmarks"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".py", ".yaml", ".txt", ".md"}:
                named = re.findall(r"\bdocs/[\w/]+\.md", file.read_text())
                assert not [page for page in named if not (ROOT / page).exists()], file
