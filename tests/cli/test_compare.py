"""`gpp-plan compare schedules=...`: schedules side by side, each with its own plan, or on the user's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_gpp.cli import plan as command_module
from lightning_gpp.cli.compare import compare
from lightning_gpp.cli.misfit import misfit
from lightning_gpp.cli.plan import overrides
from lightning_gpp.cli.planning import make_plan, show
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Answer, Control, Problem
from lightning_gpp.planning import registry as partitioners
from lightning_gpp.planning.layout import laid_out
from lightning_gpp.schedules import Schedule, schedule_names
from lightning_gpp.schedules.registry import _METHODS, register
from tests.cli.commands import command, composed
from tests.strategies import chain, towers

QUICK = ("experiment=feature_towers", "strategy.search_seconds=0.3", "strategy.num_micro_batches=4")
STAGES = "strategy.stages={mean_tower: 0, error_tower: 1, worst_tower: 2, trunk: 3}"


@pytest.fixture
def folded() -> Iterator[None]:
    """1F1B, made for two stages on each device that lie forth and back."""
    method = _METHODS["1f1b"]
    register("folded", placement="zigzag", stages_per_device=2)(method.generate)
    register("twofold", bidirectional=True)(method.generate)
    yield
    del _METHODS["folded"], _METHODS["twofold"]


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """The table, by its first column."""
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    )
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_each_schedule_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, "schedules=[gpipe,1f1b]", name="plan"))
    rows = rows_of(capsys.readouterr().out)
    assert list(rows) == ["gpipe", "1f1b"]
    assert {row["stages per device"] for row in rows.values()} == {"1"}
    assert {row["micro-batches"] for row in rows.values()} == {"4"}
    assert (rows["gpipe"]["in flight"], rows["1f1b"]["in flight"]) == ("4", "2")
    assert "1.000" in {row["of the best"] for row in rows.values()}
    assert rows["1f1b"]["messages"].startswith("36 (")  # 3 edges, 4 micro-batches: inputs there, tensors and gradients
    assert {row["gathers/sums"] for row in rows.values()} == {"0/0"}


def test_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, STAGES, "schedules=all", name="plan"))
    assert list(rows_of(capsys.readouterr().out)) == list(schedule_names())


def test_replicas_sum_and_gather(capsys: pytest.CaptureFixture[str]) -> None:
    several = ("strategy.num_pipelines=2", "trainer.devices=4", "strategy.sharding=fsdp")
    compare(composed(*QUICK, *several, "schedules=1f1b", name="plan"))
    row = rows_of(capsys.readouterr().out)["1f1b"]
    assert row["pipelines"] == "2"
    gathers, sums = map(int, row["gathers/sums"].split("/"))
    assert min(gathers, sums) > 0


def test_what_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config = composed(*QUICK, "cluster=t4_box", STAGES, "schedules=[gpipe,1f1b]", name="plan")
    config.cluster.nodes[0].device.memory_bytes = 65_000
    compare(config)
    rows = rows_of(capsys.readouterr().out)
    assert "TOO MUCH" in rows["gpipe"]["peak memory"]
    assert "TOO MUCH" not in rows["1f1b"]["peak memory"]
    assert rows["1f1b"]["of the best"] == "1.000"  # although the other may be faster
    config.cluster.nodes[0].device.memory_bytes = 1000
    compare(config)
    assert {row["of the best"] for row in rows_of(capsys.readouterr().out).values()} == {"-"}


@pytest.mark.usefixtures("folded")
def test_on_the_users_stages(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, STAGES, "schedules=[1f1b,folded,twofold]", name="plan"))
    text = capsys.readouterr().out
    assert rows_of(text)["1f1b"]["stages per device"] == "1"
    assert "\nfolded: it lays the stages on 2 devices, and there are 4. Give more stages" in text
    assert rows_of(text)["twofold"]["stages per device"] == "2/3"
    two = ("trainer.devices=2", "strategy.stages_per_device=2")
    compare(composed(*QUICK, STAGES, *two, "schedules=[1f1b,folded]", name="plan"))
    assert {row["stages per device"] for row in rows_of(capsys.readouterr().out).values()} == {"2"}


@pytest.mark.usefixtures("folded")
def test_on_the_users_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    plan, timeline = make_plan(composed(*QUICK, STAGES, name="plan"))
    plan.save(path)
    compare(composed(*QUICK[:1], f"strategy.plan={path}", "schedules=[1f1b,gpipe,folded,twofold]", name="plan"))
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert float(rows["1f1b"]["step"].split()[0]) == pytest.approx(1e3 * timeline.makespan, rel=0.01)
    assert rows["gpipe"]["in flight"] == "4"
    assert rows["folded"]["step"] == rows["twofold"]["step"] == "-"
    assert "\nfolded: it is made for 2 stages on every device; there are 4 on 4 devices." in text
    assert "\ntwofold: it runs in both directions, and wants every stage also on the mirrored device" in text


@pytest.mark.usefixtures("folded")
def test_a_layout_is_known_whatever_its_numbers() -> None:
    plan = chain([1] * 9, 8)
    zigzag, looped = laid_out(plan, 4, "zigzag"), laid_out(plan, 4, "looped")
    assert not misfit(zigzag, "folded")
    assert "over the devices forth and back, each on one device; these lie otherwise" in misfit(looped, "folded")
    wide = laid_out(towers(2, 3, 4), 3, "zigzag")
    assert not misfit(wide, "folded")


def mirrored(plan: Plan) -> Plan:
    last = plan.num_devices - 1
    places = [(stage.devices[0], last - stage.devices[0]) for stage in plan.stages]
    stages = (replace(s, devices=place, round_robin=True) for s, place in zip(plan.stages, places, strict=True))
    return replace(plan, stages=tuple(stages))


@pytest.mark.usefixtures("folded")
def test_pipelines_both_ways_fit_plans_both_ways() -> None:
    plan = chain([1] * 4, 8)
    assert misfit(plan, "twofold")
    assert not misfit(mirrored(plan), "twofold")


@pytest.mark.usefixtures("folded")
def test_both_ways_takes_two_devices_and_two_micro_batches() -> None:
    single = replace(chain([1], 8), stages=(replace(chain([1], 8).stages[0], modules=("all", "@step")),))
    assert "1 device has none; it takes 2 devices or more" in misfit(single, "twofold")
    whole = mirrored(chain([8] * 4, 8))
    assert "there is 1 micro-batch; it takes 2 or more" in misfit(whole, "twofold")
    assert not misfit(replace(whole, batch_size=16), "twofold")
    assert not misfit(single, "1f1b")


def test_a_plan_of_one_way_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show(composed(*QUICK[:2], "strategy.num_micro_batches=1", "strategy.schedule=chimera", name="plan"))
    assert "\nchimera: it runs micro-batches in both directions in turn, and there is 1" in capsys.readouterr().out
    show(composed(*QUICK, "strategy.schedule=chimera", name="plan"))
    assert "chimera: it" not in capsys.readouterr().out


def test_names_are_checked() -> None:
    with pytest.raises(
        ConfigError, match=r"'best' in schedules does not exist. Choose all, or some of: .*1f1b, .*gpipe"
    ):
        compare(composed(*QUICK, "schedules=[1f1b,best]", name="plan"))
    with pytest.raises(ConfigError, match=r"schedules=\[\] names none. Choose all"):
        compare(composed(*QUICK, "schedules=[]", name="plan"))
    with pytest.raises(ConfigError, match="Both partitioners and schedules are given"):
        compare(composed(*QUICK, "schedules=all", "partitioners=[auto]", name="plan"))
    with pytest.raises(ConfigError, match="schedules=1f1b is for gpp-plan compare"):
        show(composed(*QUICK, "schedules=1f1b", name="plan"))


def test_the_word_schedule() -> None:
    assert overrides(["compare", "schedule=[1f1b,gpipe]"]) == ["compare=true", "schedules=[1f1b,gpipe]"]
    assert overrides(["strategy.schedule=gpipe"]) == ["strategy.schedule=gpipe"]


@pytest.fixture
def stubborn() -> Iterator[None]:
    """A schedule during which the user presses Ctrl-C, and one that takes its time."""

    @register("stubborn")
    def interrupted(plan: Plan, batch_size: int) -> Schedule:
        raise KeyboardInterrupt

    @register("slow")
    def slow(plan: Plan, batch_size: int) -> Schedule:
        time.sleep(60)
        raise AssertionError

    yield
    del _METHODS["stubborn"], _METHODS["slow"]


@pytest.mark.usefixtures("stubborn")
@pytest.mark.parametrize("stages", [(), (STAGES,)])
def test_ctrl_c_keeps_the_rows_so_far(stages: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    config = composed(*QUICK, *stages, "compare=true", "schedules=[1f1b,stubborn,gpipe]", name="plan")
    with pytest.raises(SystemExit) as caught:
        command_module.plan(config)
    captured = capsys.readouterr()
    assert caught.value.code == 130
    assert list(rows_of(captured.out)) == ["1f1b"]
    assert "interrupted before the comparison was complete" in captured.err


def test_ctrl_c_during_a_search_that_keeps_its_best_ends_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    @partitioners.register("hurried")
    def search(problem: Problem, control: Control) -> Answer:
        answer = partitioners.partitioner_of("auto")(problem, control)
        return replace(answer, notes=(*answer.notes, "The search was interrupted."))

    try:
        config = composed(*QUICK, "strategy.partitioner=hurried", "schedules=[gpipe,1f1b]", name="plan")
        with pytest.raises(KeyboardInterrupt):
            compare(config)
    finally:
        del partitioners._PARTITIONERS["hurried"]
    assert list(rows_of(capsys.readouterr().out)) == ["gpipe"]


@pytest.mark.usefixtures("stubborn")
def test_what_takes_too_long_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, "compare_seconds=3", "schedules=[slow,1f1b]", name="plan"))
    text = capsys.readouterr().out
    assert text.rstrip().endswith("slow: no plan after compare_seconds=3 seconds.")
    assert rows_of(text)["1f1b"]["of the best"] == "1.000"


def test_on_the_command_line(tmp_path: Path) -> None:
    result = command("plan", "compare", "schedule=[1f1b,gpipe]", *QUICK, STAGES, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(rows_of(result.stdout)) == ["1f1b", "gpipe"]
