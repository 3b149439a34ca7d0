"""`gpp-plan compare schedules=...`: schedules side by side, each with its own plan, or on the user's."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_gpp.cli import plan as command_module
from lightning_gpp.cli.compare import compare, in_time
from lightning_gpp.cli.plan import overrides
from lightning_gpp.cli.planning import show
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Answer, Problem, Request, SearchControl
from lightning_gpp.planning.assignment.layout import laid_out
from lightning_gpp.planning.assignment.layout_check import layout_mismatch
from lightning_gpp.planning.problem import partitioner as partitioners
from lightning_gpp.reports.units import duration
from lightning_gpp.schedules import Schedule, schedule_names
from lightning_gpp.schedules.registry import SCHEDULES, register_schedule
from tests.cli.commands import command, composed, make_plan
from tests.interpreter import Program
from tests.strategies import chain, towers

QUICK = ("experiment=feature_towers", "strategy.search_seconds=0.3", "strategy.num_micro_batches=4")
STAGES = "strategy.stages={mean_tower: 0, error_tower: 1, worst_tower: 2, trunk: 3}"


@pytest.fixture
def folded() -> Iterator[None]:
    """1F1B, made for two stages on each device that lie forth and back."""
    method = SCHEDULES.entries["1f1b"]
    register_schedule("folded", layout="zigzag", stages_per_device=2)(method.generate)
    register_schedule("twofold", bidirectional=True)(method.generate)
    yield
    del SCHEDULES.entries["folded"], SCHEDULES.entries["twofold"]


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """The table, by its first column."""
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    )
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_each_schedule_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, STAGES, "schedules=[gpipe,1f1b]", name="plan"))
    rows = rows_of(capsys.readouterr().out)
    assert list(rows) == ["gpipe", "1f1b"]
    assert {row["stages per device"] for row in rows.values()} == {"1"}
    assert {row["micro-batches"] for row in rows.values()} == {"4"}
    assert (rows["gpipe"]["in flight"], rows["1f1b"]["in flight"]) == ("4", "2")
    assert "1.000" in {row["of the best"] for row in rows.values()}
    assert rows["1f1b"]["messages"].startswith("36 (")  # 3 edges, 4 micro-batches: inputs there, tensors and gradients
    assert {row["unshards/reductions"] for row in rows.values()} == {"0/0"}


def test_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, STAGES, "schedules=all", name="plan"))
    assert list(rows_of(capsys.readouterr().out)) == list(schedule_names())


@pytest.mark.acceptance
def test_schedules_without_a_steady_state_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, "strategy.weights=stash", "schedules=all", name="plan"))
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert "period" in next(line for line in text.splitlines() if "|" in line)
    assert {"1f1b", "zb_h1", "interleaved"} <= set(rows) <= set(schedule_names())
    assert "gpipe" in text
    assert "flush" in text


def test_replicas_sum_and_gather(capsys: pytest.CaptureFixture[str]) -> None:
    several = ("strategy.num_pipelines=2", "trainer.devices=4", "strategy.sharding=fsdp")
    compare(composed(*QUICK, *several, "schedules=1f1b", name="plan"))
    row = rows_of(capsys.readouterr().out)["1f1b"]
    assert row["pipelines"] == "2"
    unshards, reductions = map(int, row["unshards/reductions"].split("/"))
    assert min(unshards, reductions) > 0


def test_sharding_that_splits_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show(composed(*QUICK, STAGES, "strategy.sharding=zero1", name="plan"))
    assert "\nstrategy.sharding=zero1 has nothing to split: every stage is on one" in capsys.readouterr().out
    several = ("strategy.num_pipelines=2", "trainer.devices=8")
    show(composed(*QUICK, STAGES, *several, "strategy.sharding=zero1", name="plan"))
    assert "has nothing to split" not in capsys.readouterr().out


def test_what_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config = composed(*QUICK, "cluster=t4_box", STAGES, "schedules=[gpipe,1f1b]", name="plan")
    config.cluster.nodes[0].device.memory_bytes = 72_000  # less the headroom
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
    assert "\nfolded: it lays the stages out over 2 devices, but there are 4. Give more stages" in text
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
    assert rows["folded"]["step"] == rows["1f1b"]["step"]
    assert "\nfolded: it is made for 2 stages per device; the plan has 4 on 4 devices. The row shows" in text
    assert (
        "\ntwofold: it runs in both directions, which needs a second replica of every stage on the mirrored device"
        in text
    )
    assert "1f1b:" not in text


def test_a_plan_is_compared_as_the_strategy_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (QUICK[0], f"strategy.plan={tmp_path / 'plan.yaml'}")
    make_plan(composed(*QUICK, STAGES, name="plan"))[0].save(tmp_path / "plan.yaml")
    names = ("1f1b", "zb_h1", "interleaved", "zbv", "chimera")
    compare(composed(*given, f"schedules=[{','.join(names)}]", name="plan"))
    rows = rows_of(capsys.readouterr().out)
    for name in names:
        plan, timeline = make_plan(composed(*given, f"strategy.schedule={name}", name="plan"))
        assert plan.schedule == name
        assert rows[name]["step"] == duration(timeline.makespan)


@pytest.mark.usefixtures("folded")
def test_a_layout_is_known_whatever_its_numbers() -> None:
    plan = chain([1] * 9, 8)
    zigzag, looped = laid_out(plan, 4, "zigzag"), laid_out(plan, 4, "looped")
    assert not layout_mismatch(zigzag, "folded")
    assert "back and forth over the devices, one device each; this plan places them differently" in layout_mismatch(
        looped, "folded"
    )
    wide = laid_out(towers(2, 3, 4), 3, "zigzag")
    assert not layout_mismatch(wide, "folded")


def mirrored(plan: Plan) -> Plan:
    last = plan.num_devices - 1
    places = [(stage.devices[0], last - stage.devices[0]) for stage in plan.stages]
    stages = (replace(s, devices=place, round_robin=True) for s, place in zip(plan.stages, places, strict=True))
    return replace(plan, stages=tuple(stages))


@pytest.mark.usefixtures("folded")
def test_pipelines_both_ways_fit_plans_both_ways() -> None:
    plan = chain([1] * 4, 8)
    assert layout_mismatch(plan, "twofold")
    assert not layout_mismatch(mirrored(plan), "twofold")


@pytest.mark.usefixtures("folded")
def test_both_ways_takes_two_devices_and_two_micro_batches() -> None:
    single = replace(chain([1], 8), stages=(replace(chain([1], 8).stages[0], modules=("all", "@step")),))
    assert "it runs in both directions, which takes 2 devices or more" in layout_mismatch(single, "twofold")
    whole = mirrored(chain([8] * 4, 8))
    assert "which takes 2 micro-batches or more" in layout_mismatch(whole, "twofold")
    assert not layout_mismatch(replace(whole, batch_size=16), "twofold")
    assert not layout_mismatch(single, "1f1b")


def test_a_plan_of_one_way_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show(composed(*QUICK[:2], "strategy.num_micro_batches=1", "strategy.schedule=chimera", name="plan"))
    assert "\nchimera: it runs micro-batches in both directions in turn, which takes 2" in capsys.readouterr().out
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

    @register_schedule("stubborn")
    def interrupted(plan: Plan, batch_size: int) -> Schedule:
        raise KeyboardInterrupt

    @register_schedule("slow")
    def slow(plan: Plan, batch_size: int) -> Schedule:
        time.sleep(60)
        raise AssertionError

    yield
    del SCHEDULES.entries["stubborn"], SCHEDULES.entries["slow"]


@pytest.mark.usefixtures("stubborn")
@pytest.mark.parametrize("stages", [(), (STAGES,)])
def test_ctrl_c_keeps_the_rows_so_far(stages: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    config = composed(*QUICK, *stages, "compare=true", "schedules=[1f1b,stubborn,gpipe]", name="plan")
    with pytest.raises(KeyboardInterrupt, match="before the comparison was complete"):
        command_module.plan(config)
    assert list(rows_of(capsys.readouterr().out)) == ["1f1b"]


def test_ctrl_c_during_a_search_that_keeps_its_best_ends_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    @partitioners.register_partitioner("hurried")
    def search(problem: Problem, control: SearchControl) -> Answer:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        return partitioners.partitioner_of("auto")(problem, control)

    try:
        config = composed(*QUICK, "strategy.partitioner=hurried", "schedules=[gpipe,1f1b]", name="plan")
        with pytest.raises(KeyboardInterrupt):
            compare(config)
    finally:
        del partitioners.PARTITIONERS.entries["hurried"]
    assert list(rows_of(capsys.readouterr().out)) == ["gpipe"]


@pytest.fixture
def lost() -> Iterator[None]:
    """Schedules during which the user presses Ctrl-C, of which nothing is left, or another error."""

    @register_schedule("dropping")
    def dropping(plan: Plan, batch_size: int) -> Schedule:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return SCHEDULES.entries["1f1b"].generate(plan, batch_size)

    @register_schedule("importing")
    def importing(plan: Plan, batch_size: int) -> Schedule:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("numpy.core.multiarray failed to import") from None
        raise AssertionError

    yield
    del SCHEDULES.entries["dropping"], SCHEDULES.entries["importing"]


@pytest.mark.usefixtures("lost")
@pytest.mark.parametrize("stages", [(), (STAGES,)])
@pytest.mark.parametrize(("name", "rows"), [("dropping", ["1f1b", "dropping"]), ("importing", ["1f1b"])])
def test_ctrl_c_is_not_lost(
    name: str, rows: list[str], stages: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        compare(composed(*QUICK, *stages, f"schedules=[1f1b,{name},gpipe]", name="plan"))
    assert list(rows_of(capsys.readouterr().out)) == rows
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_during_the_search_of_a_partitioner(capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps the best that it has found by then; the comparison ends."""
    once = iter([True])

    @partitioners.register_partitioner("hurried")
    def search(problem: Problem, control: SearchControl) -> Answer:
        def press(*_: object) -> None:
            if next(once, False):
                signal.raise_signal(signal.SIGINT)

        return partitioners.partitioner_of("auto")(problem, replace(control, progress=press))

    try:
        with pytest.raises(KeyboardInterrupt):
            compare(composed(*QUICK, "partitioners=[pipedream,hurried,auto]", name="plan"))
    finally:
        del partitioners.PARTITIONERS.entries["hurried"]
    out = capsys.readouterr().out
    assert [name for name in ("pipedream", "hurried", "auto") if f"| {name} " in out] == ["pipedream", "hurried"]


MARKED = """
import time
from pathlib import Path
from lightning_gpp.cli.plan import main
from lightning_gpp.schedules.registry import register_schedule

@register_schedule("marked")
def marked(plan, batch_size):
    Path("reached").touch()
    time.sleep(60)

main()
"""


def until(happened: Callable[[], bool], seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_ctrl_c_of_a_process(tmp_path: Path) -> None:
    """A signal from outside, while the second row is made."""
    (tmp_path / "mark.py").write_text(MARKED)
    program = Program("mark.py", "compare", "schedules=[1f1b,marked]", *QUICK, STAGES, cwd=tmp_path)
    until(lambda: (tmp_path / "reached").exists() or not program.running)
    program.send_signal(signal.SIGINT)
    code, output = program.outcome(50)
    assert code == 130, output
    assert list(rows_of(output)) == ["1f1b"]
    assert "interrupted before the comparison was complete" in output


@pytest.mark.usefixtures("stubborn")
def test_what_takes_too_long_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    compare(composed(*QUICK, "compare_seconds=3", "schedules=[slow,1f1b]", name="plan"))
    text = capsys.readouterr().out
    assert text.rstrip().endswith("slow: no plan after compare_seconds=3 seconds. Raise it.")
    assert rows_of(text)["1f1b"]["of the best"] == "1.000"


def test_on_the_command_line(tmp_path: Path) -> None:
    result = command("plan", "compare", "schedule=[1f1b,gpipe]", *QUICK, STAGES, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(rows_of(result.stdout)) == ["1f1b", "gpipe"]


def test_a_picture_shows_a_plan_as_chain_and_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "compared.svg"
    compare(composed(*QUICK, STAGES, "schedules=1f1b", f"svg={picture}", name="plan"))
    assert "| 1f1b" in capsys.readouterr().out
    text = picture.read_text()
    assert "Chain: 4 stages, 4 deep" in text
    assert "Graph: 4 stages, 2 deep" in text


def test_searches_leave_time_for_an_answer() -> None:
    request = Request(cluster=preset_cluster("t4_box"), batch_size=8, seconds=60)
    assert (in_time(request, 5).seconds, in_time(request, 500).seconds) == (3, 60)
