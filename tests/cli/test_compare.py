"""`gpp-plan compare`: partitioners or schedules side by side, each with its own plan, or on the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_gpp.cli.compare import compare
from lightning_gpp.cli.planning import show
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.reports.units import duration
from lightning_gpp.schedules import Schedule, schedule_names
from lightning_gpp.schedules.registry import SCHEDULES, register_schedule
from tests.cli.commands import composed, make_plan

QUICK = ("experiment=feature_towers", "strategy.search_seconds=0.3", "strategy.num_micro_batches=4")
STAGES = "strategy.stages={mean_tower: 0, error_tower: 1, worst_tower: 2, trunk: 3}"


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """The table, by its first column."""
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    )
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows if row[0]}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def others() -> Iterator[None]:
    """1F1B, made for two stages on each device that lie forth and back, and a schedule during which the user presses
    Ctrl-C."""
    register_schedule("folded", layout="zigzag", stages_per_device=2)(SCHEDULES.entries["1f1b"].generate)

    @register_schedule("stubborn")
    def interrupted(plan: Plan, batch_size: int) -> Schedule:
        raise KeyboardInterrupt

    yield
    for name in ("folded", "stubborn"):
        del SCHEDULES.entries[name]


def test_all_schedules_on_the_users_stages(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, STAGES, "schedules=all", name="plan"))
    rows = rows_of(capsys.readouterr().out)
    assert list(rows) == list(schedule_names())
    assert rows["1f1b"]["micro-batches"] == rows["gpipe"]["micro-batches"] == "4"
    assert "1.000" in {row["of the best"] for row in rows.values()}


def test_what_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config = composed(*QUICK, "cluster=t4_box", STAGES, "schedules=[gpipe,1f1b]", name="plan")
    config.cluster.nodes[0].device.memory_bytes = 72_000  # less the headroom
    compare(config)
    rows = rows_of(capsys.readouterr().out)
    assert "TOO MUCH" in rows["gpipe"]["peak memory"]
    assert "TOO MUCH" not in rows["1f1b"]["peak memory"]
    assert rows["1f1b"]["of the best"] == "1.000"  # although the other may be faster


@pytest.mark.usefixtures("others")
def test_a_plan_is_compared_as_the_strategy_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (QUICK[0], f"strategy.plan={tmp_path / 'plan.yaml'}")
    make_plan(composed(*QUICK, STAGES, name="plan"))[0].save(tmp_path / "plan.yaml")
    names = ("1f1b", "zb_h1", "interleaved", "zbv")
    compare(composed(*given, f"schedules=[{','.join(names)},folded]", name="plan"))
    text = capsys.readouterr().out
    rows = rows_of(text)
    for name in names:
        plan, timeline = make_plan(composed(*given, f"strategy.schedule={name}", name="plan"))
        assert plan.schedule == name
        assert rows[name]["step"] == duration(timeline.makespan)
    assert "\nfolded: it is made for 2 stages per device; the plan has 4 on 4 devices." in text


def test_partitioners_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, "partitioners=[auto,pipedream]", name="plan"))
    assert list(rows_of(capsys.readouterr().out)) == ["auto", "pipedream"]


def test_names_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"'best' in schedules does not exist. Choose some of: .*1f1b, .*gpipe"):
        compare(composed(*QUICK, STAGES, "schedules=[1f1b,best]", name="plan"))
    with pytest.raises(ConfigError, match=r"schedules=\[\] names none. Choose some"):
        compare(composed(*QUICK, STAGES, "schedules=[]", name="plan"))
    with pytest.raises(ConfigError, match=r"leave out strategy.plan and strategy.stages"):
        compare(composed(*QUICK, STAGES, name="plan"))
    with pytest.raises(ConfigError, match="Both partitioners and schedules are given"):
        compare(composed(*QUICK, "schedules=all", "partitioners=[auto]", name="plan"))
    with pytest.raises(ConfigError, match="schedules=1f1b is for gpp-plan compare"):
        show(composed(*QUICK, "schedules=1f1b", name="plan"))


@pytest.mark.usefixtures("others")
def test_ctrl_c_keeps_the_rows_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        compare(composed(*QUICK, STAGES, "schedules=[1f1b,stubborn,gpipe]", name="plan"))
    assert list(rows_of(capsys.readouterr().out)) == ["1f1b"]
