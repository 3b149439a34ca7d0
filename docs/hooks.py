"""What the site adds to its pages: options and names from their definitions; links that leave the site become text.

`<!-- options -->` on a page is replaced by every option of the strategy, `<!-- names -->` by the names that options
take, and `<!-- file PATH -->` by a file of the repository. Sections of the page of the public interface end with the
signatures and docstrings of the names in their headings. MkDocs calls `on_page_markdown`; a test calls `expanded`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lightning_gpp.option import Option, options_of
from lightning_gpp.planning.problem.partitioner import PARTITIONERS
from lightning_gpp.registry import Registry
from lightning_gpp.runtime.weights.policy import WEIGHT_POLICIES
from lightning_gpp.schedules.registry import SCHEDULES
from lightning_gpp.training.options import Options

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]*)\)")
PAGE = re.compile(r"docs/([\w/]+\.md)(#[\w-]*)?")
REGISTRIES: dict[str, Registry[Any]] = {
    "schedule": SCHEDULES,
    "partitioner": PARTITIONERS,
    "weights": WEIGHT_POLICIES,
}


INTERFACE = "reference/python.md"
WITHOUT_DOCSTRING = {"STEP", "SOURCE", "sequence", "__version__"}
HIDDEN = {"show_signature": False, "show_docstring_parameters": False, "separate_signature": False}
BY_THE_LIBRARY = {"GPPStrategy", "GPPFabricStrategy", "Options", "Engine"}
"""Classes whose arguments are the options, or that only the library makes."""
MEMBERS = {
    "GPPStrategy": "plan timeline report grad_norm optimizer_state",
    "Engine": "train_step evaluate feed clip_grad_norm grad_norm state_dict load_state_dict optimizer_state_dict "
    "load_optimizer_state_dict pipeline_state_dict load_pipeline_state_dict",
    "Plan": "load save intervals",
    "Cluster": "of_nodes uniform subset",
    "Timeline": "makespan bubble_fraction",
}
"""Members that users call."""


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Called by MkDocs for every page."""
    path = page.file.src_uri
    return expanded(interface(markdown) if path == INTERFACE else markdown, path)


def interface(markdown: str) -> str:
    """The page with directives for mkdocstrings at the ends of its sections."""
    first, *sections = re.split(r"(?m)^(?=## )", markdown)
    return first + "".join(f"{section}\n{''.join(directives(section))}" for section in sections)


def directives(section: str) -> Iterator[str]:
    names = re.findall(r"`(\w+)`", section.splitlines()[0])
    for name in names:
        if name not in WITHOUT_DOCSTRING:
            yield directive(name, **(HIDDEN if name in BY_THE_LIBRARY else {}))
        for member in MEMBERS.get(name, "").split():
            yield directive(f"{name}.{member}", heading_level=5)
    for name in ("carry", "positions", "causal_attention") if "sequence" in names else ():
        yield directive(f"sequence.{name}")


def directive(name: str, **further: Any) -> str:
    return f"::: lightning_gpp.{name}\n    options: {json.dumps(further)}\n\n"


def expanded(markdown: str, path: str) -> str:
    """The text of the page at `path` below docs, with what is generated, and without links that leave the site."""
    folder = os.path.dirname(path)
    markdown = markdown.replace("<!-- options -->", "\n".join(options(folder)))
    markdown = markdown.replace("<!-- names -->", "\n".join(names()))
    markdown = re.sub(r"<!-- file (\S+) -->", lambda found: block(found[1]), markdown)
    return OUTSIDE.sub(lambda link: link[0] if _inside(folder, link[2]) else link[1], markdown)


def options(folder: str) -> Iterator[str]:
    """Every option of the strategy under a heading of its own, in sections."""
    for definition in options_of(Options):
        if definition.section:
            yield f"## {PAGE.sub('', definition.section).replace(' ()', '')}\n"
        yield from described(definition, folder)


def described(definition: Option, folder: str) -> Iterator[str]:
    yield f"### {definition.name}\n"
    default = yaml.safe_dump(definition.default).splitlines()[0]
    yield f"Default: `{default}`.{f' Allowed: {escaped(definition.allowed)}.' if definition.allowed else ''}\n"
    text = escaped(definition.help[0].upper() + definition.help[1:])
    yield PAGE.sub(lambda found: linked(found[1], found[2] or "", folder), text) + "\n"


def linked(page: str, section: str, folder: str) -> str:
    return f"[{Path(page).stem.replace('_', ' ')}]({os.path.relpath(page, folder)}{section})"


def names() -> Iterator[str]:
    """The names that are registered for schedules, partitioners and weight policies, and the shipped clusters."""
    yield "| option | names |\n|---|---|"
    clusters = sorted(file.stem for file in (ROOT / "configs/cluster").glob("*.yaml"))
    registered = {name: (*registry.built_in, *registry.names()) for name, registry in REGISTRIES.items()}
    for name, entries in {**registered, "cluster": clusters}.items():
        yield f"| `{name}` | {', '.join(f'`{entry}`' for entry in entries)} |"


def block(path: str) -> str:
    """A file of the repository as a code block."""
    file = ROOT / path
    return f"```{file.suffix[1:]}\n{file.read_text().strip()}\n```"


def escaped(text: str) -> str:
    return re.sub(r"\b_(\w+)_\b", r"\\_\1\\_", text.replace("<", "&lt;"))


def _inside(folder: str, link: str) -> bool:
    return not os.path.normpath(os.path.join(folder, link)).startswith("..")
