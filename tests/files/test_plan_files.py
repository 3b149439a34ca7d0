"""Plan files: their version, and one sentence for each that cannot be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gpp import ConfigError, PlanError
from lightning_gpp.plan import Plan
from tests.schedules.random_plans import case_of
from tests.strategies import chain


def written(folder: Path, old: str = "", new: str = "") -> Path:
    """The file of a chain of two stages, with a part of its text exchanged."""
    path = folder / "plan.yaml"
    chain([1, 1], 4).save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else new or text)
    return path


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert path.read_text().startswith("version: 1\n")
    for number in range(48):  # three of each schedule, with replicas and slices in any order
        plan = case_of(number).plan
        plan.save(path)
        assert Plan.load(path) == plan


def test_the_option_names_the_processes_of_a_plan_that_does_not() -> None:
    plan = chain([1, 1], 4)
    divided = plan.with_members(2)
    assert (plan.with_members(1), divided.num_processes) == (plan, 4)
    assert divided.with_members(1) == divided.with_members(2) == divided
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4, but the plan .* has 2 processes per device"):
        divided.with_members(4)


def test_a_file_without_a_version_is_of_version_1(tmp_path: Path) -> None:
    assert Plan.load(written(tmp_path, "version: 1\n")) == chain([1, 1], 4)


def test_a_mark_of_the_encoding_is_no_part_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert Plan.load(path) == chain([1, 1], 4)


def test_numbers_without_a_point_and_missing_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "figures:", "figures: {flops: {per_sample: 1e9}, num_parameters: 3}\n  unread:")
    text = re.sub(r"  unread:\n(    .*\n)+", "", path.read_text(), count=1)
    path.write_text(text.replace("  tokens: null\n", ""))
    figures = Plan.load(path).stages[0].figures
    assert (figures.flops.at(2), figures.num_parameters) == (2e9, 3)


REFUSED = {
    "empty": ("", "\n", r"the file is empty\. Write plans with `gpp-plan"),
    "a list": ("", "[1, 2]", r"the content is \[1, 2\]; it must be a mapping"),
    "no YAML": ("", "{a: [", r"is not YAML that can be read: .* line 2"),
    "newer": ("version: 1", "version: 2", r"version is 2, and this release .* reads plans up to version 1\. Update"),
    "twice": ("\nbatch_size: 4", "\nbatch_size: 4\nbatch_size: 8", r"the key 'batch_size' is there twice in line \d+"),
    "no version": ("version: 1", "version: one", r"version is 'one'; it must be 1, or left out"),
    "unknown": ("\nbatch_size:", "\nsize:", r"\): size is not a key\. Did you mean batch_size\? There are: .*, stages"),
    "missing": ("\nbatch_size: 4", "", r"\): batch_size is missing\. Write plans"),
    "missing in a stage": ("  micro_batch_size: 1\n", "", r"stages\[0\]\.micro_batch_size is missing\."),
    "unknown in a stage": (
        "recompute: false",
        "recompute_: false",
        r"stages\[0\]\.recompute_ is not a key\.",
    ),
    "unknown figure": ("flops:", "flop:", r"stages\[0\]\.figures\.flop is not a key\. Did you mean flops\?"),
    "text": (
        "micro_batch_size: 1",
        "micro_batch_size: one",
        r"stages\[0\]\.micro_batch_size is 'one'; it must be a whole number",
    ),
    "fraction": ("- 1\n", "- 1.5\n", r"stages\[0\]\.devices\[0\] is 1\.5; it must be a whole number"),
    "flag": ("recompute: false", "recompute: 1", r"stages\[0\]\.recompute is 1; it must be true or false"),
    "NaN": ("per_sample: 0", "per_sample: .nan", r"figures\.flops\.per_sample is nan; it must be a finite number"),
    "negative device": ("- 1\n", "- -1\n", r"Devices must be numbered 0\.\.n-1 without gaps; the stages use \[-1, 0\]"),
    "a billion devices": ("- 1\n", "- 1000000000\n", r"Devices must be numbered .* use \[0, 1000000000\]"),
    "no micro-batch": (
        "micro_batch_size: 1",
        "micro_batch_size: 0",
        r"'stage0': micro_batch_size is 0; it must be",
    ),
    "half an interval": ("tokens: null", "tokens: [1]", r"stages\[0\]\.tokens\[1\] is missing"),
    "a number": ("name: stage0", "name: 2024", r"stages\[0\]\.name is 2024; it must be a valid string"),
    "a long text": ("- 1\n", f"- {'x' * 10_000}\n", r"devices\[0\] is 'x{30,50}\.\.\.x+'; it must be a whole number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plan_is_refused_in_one_paragraph(case: str, tmp_path: Path) -> None:
    old, new, message = REFUSED[case]
    path = written(tmp_path, old, new)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("name: Müller".encode("latin-1"))
    for name, message in (
        ("none.yaml", r"none.yaml \(strategy.plan\): cannot be read: No such file or directory"),
        ("", "cannot be read: Is a directory"),
        ("latin.yaml", r"latin.yaml \(strategy.plan\): is not text in UTF-8, see byte 7"),
    ):
        with pytest.raises(PlanError, match=message):
            Plan.load(tmp_path / name)


def test_plans_alone_do_not_load_what_reads_files() -> None:
    code = "import sys, lightning_gpp.plan; print({'pydantic', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
