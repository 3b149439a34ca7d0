"""Messages name settings in the words of whoever has made them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_gpp
from lightning_gpp import GPPStrategy
from lightning_gpp.errors import ConfigError
from lightning_gpp.wording import WORDS, spoken


@pytest.mark.parametrize(
    ("setting", "python"),
    [
        ("strategy.step=whole.", 'GPPStrategy(step="whole").'),
        ("(strategy.stages)", "(GPPStrategy's stages)"),
        ("strategy.schedule=1f1b, or", 'GPPStrategy(schedule="1f1b"), or'),
        ("strategy.self_check=false", "GPPStrategy(self_check=False)"),
        ("strategy.memory_headroom=0.25.", "GPPStrategy(memory_headroom=0.25)."),
        ("strategy.sharding='fsdp'", 'GPPStrategy(sharding="fsdp")'),
        ("strategy.batch_dims={x.y: 1, w: null}", 'GPPStrategy(batch_dims={"x.y": 1, "w": None})'),
        ("strategy.loss_reduction=mask:except0", 'GPPStrategy(loss_reduction="mask:except0")'),
        ("trainer.strategy.report(path)", "trainer.strategy.report(path)"),
        ("trainer.devices=4", "trainer.devices=4"),
    ],
)
def test_settings_are_named_as_they_are_made(setting: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spoken(setting) == setting
    monkeypatch.delenv(WORDS)
    assert spoken(setting) == python


def test_errors_speak_python_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORDS)
    with pytest.raises(ConfigError, match=r'Use GPPStrategy\(sharding="zero1"\)') as caught:
        GPPStrategy(sharding="fsdp", weights="stash")
    assert "strategy." not in str(caught.value)


VERBS = (
    "add call change choose correct divide do edit give keep leave let list make merge move name pass plan put raise "
    "remove return run set skip start take train update use write"
)
DO = "|".join((*VERBS.split(), *VERBS.title().split()))
TWO_REMEDIES = re.compile(
    rf"(?:^|[.;:] )(?:{DO})\b(?:[^.;]|\.(?=\S))*? or (?:{DO}|strategy\.|trainer\.|cluster\.)|[.;,] [Oo]r (?:{DO})\b"
)


def sentences(path: Path) -> Iterator[str]:
    """The texts of a file, without its docstrings; what is filled in is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in parts and isinstance(node, ast.Constant | ast.JoinedStr):
            values = node.values if isinstance(node, ast.JoinedStr) else [node]
            yield "".join(str(value.value) for value in values if isinstance(value, ast.Constant))


def test_messages_name_one_thing_to_do() -> None:
    files = sorted(Path(lightning_gpp.__file__).parent.rglob("*.py"))
    assert [text for file in files for text in sentences(file) if TWO_REMEDIES.search(text)] == []
