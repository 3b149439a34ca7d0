"""Every message ends with the short name of its section of the troubleshooting page, and every section has messages."""

from __future__ import annotations

import ast
import pickle
import warnings

import pytest

from lightning_gpp import errors
from lightning_gpp.errors import CheckpointError, ConfigError, GPPError, MissingCheckpointError, PeerFailure, PlanError
from lightning_gpp.explained import FAMILIES, named_at_end, sections, without_name
from lightning_gpp.wording import WORDS, warn
from tests.pages import ROOT

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, GPPError)]
FOREIGN = {"cached"}
"""Families whose words are torch's."""


def test_sections_are_the_short_names() -> None:
    assert set(sections()) == {*FAMILIES, *(each.family for each in CLASSES)}


def test_every_section_says_what_to_do_and_quotes_its_words() -> None:
    """An ellipsis stands for what a message fills in."""
    for name, text in sections().items():
        assert "*Do:*" in text, name
        words = " ".join(text.replace("*", "").split()).replace("…", "")
        assert FAMILIES.get(name, "") in words, name


def constants() -> str:
    """All text of the package's messages; what an f-string fills in is left out."""
    files = (file for file in (ROOT / "lightning_gpp").rglob("*.py") if file.name != "explained.py")
    texts = (
        node.value for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
    )
    return "\n".join(text for text in texts if isinstance(text, str))


def test_words_of_families_are_those_of_messages() -> None:
    said = constants()
    assert [name for name, words in FAMILIES.items() if name not in FOREIGN and words not in said] == []


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_ends_with_its_name_once(kind: type[GPPError]) -> None:
    end = f" (gpp-doctor explain {kind.family})"
    error = kind("No.")
    assert str(error) == f"No.{end}"
    assert str(kind(str(error))) == str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kind()) == ""


def test_words_come_before_the_class_and_quoted_messages_before_both() -> None:
    inner = PlanError("The plan needs 3 devices, the job has 2. Choose.")
    assert str(inner).endswith(" Choose. (gpp-doctor explain more-devices)")
    outer = PeerFailure(f"First cause: rank 1 raised {inner} Look there.")
    assert str(outer) == f"First cause: rank 1 raised {inner.args[0]} Look there. (gpp-doctor explain more-devices)"
    assert without_name(str(outer)) == outer.args[0].replace(" (gpp-doctor explain more-devices)", "")


def test_files_that_are_missing_are_explained_too() -> None:
    assert str(MissingCheckpointError("None.")) == f"None. (gpp-doctor explain {CheckpointError.family})"


def test_warnings_have_names_by_their_words() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("self.steps is changed. It runs once per micro-batch, 4 times.")
        warn("Something else.")
    first, second = (str(warning.message) for warning in caught)
    assert first.endswith(" 4 times. (gpp-doctor explain counter)")
    assert second == "Something else." == named_at_end("Something else.")


def test_python_reads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError("strategy.slices is 0; it must be a whole number >= 1, or null.")
    assert "or null" in str(error)
    monkeypatch.delenv(WORDS)
    assert "GPPStrategy's slices is 0; it must be a whole number >= 1, or None." in str(error)
