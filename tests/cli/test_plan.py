"""`gpp-plan`: what it prints and writes, for the examples, without a process group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from omegaconf import DictConfig

from lightning_gpp.cli.planning import show
from lightning_gpp.cli.task import num_processes
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import schedule_names
from tests.cli import commands
from tests.cli.commands import make_plan


def composed(*overrides: str, name: str = "plan") -> DictConfig:
    """A configuration whose search is short: no test here judges how good a plan is."""
    return commands.composed("strategy.search_seconds=0.5", *overrides, name=name)


@pytest.mark.parametrize(("experiment", "num_stages"), [("two_tower", 4), ("feature_towers", 4), ("gpt_text", 2)])
def test_the_examples_are_planned(
    experiment: str, num_stages: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    show(composed(f"experiment={experiment}"))
    text = capsys.readouterr().out
    header = "stage modules devices samples parameters FLOPs activations in flight"
    assert [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")] == header.split(" ", 7)
    assert f"{num_stages} stages on {num_stages} devices" in text
    assert "device 0 |" in text
    assert "| devices | holds " in text
    assert not dist.is_initialized()


def test_what_it_writes_can_be_read(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("plan.yaml", "trace.json", "report.html")}
    names = zip(("output", "trace", "report"), files.values(), strict=True)
    config = composed("experiment=feature_towers", *(f"{key}={path}" for key, path in names))
    show(config)
    saved = composed("experiment=feature_towers", f"strategy.plan={files['plan.yaml']}")
    plan, _ = make_plan(saved)
    assert Plan.load(files["plan.yaml"]) == plan
    report = (tmp_path / "report.html").read_text()
    assert "<h1>feature_towers on " in report
    assert report.count("<svg") == 2


def test_the_planner_may_choose_the_schedule() -> None:
    """The fastest of all, also where the stages are given."""
    stages = "strategy.stages={mean_tower: 0, error_tower: 0, worst_tower: 0, trunk: 1}"
    config = composed("experiment=feature_towers", "trainer.devices=2", "strategy.schedule=auto", stages)
    plan, timeline = make_plan(config)
    plain = composed("experiment=feature_towers", "trainer.devices=2", stages)
    assert plan.schedule in schedule_names()
    assert timeline.makespan <= make_plan(plain)[1].makespan


def test_a_stage_declared_with_two_replicas() -> None:
    stages = (
        "[{name: image, modules: [image_tower], devices: [1]}, {name: text, modules: [text_tower], devices: [2, 3]}, "
        "{name: head, modules: [head, '@step'], devices: [0]}]"
    )
    plan, _ = make_plan(composed("experiment=two_tower", f"strategy.stages={stages}"))
    assert {stage.name: stage.devices for stage in plan.stages} == {"image": (1,), "text": (2, 3), "head": (0,)}


def test_a_plan_whose_step_is_not_on_device_0_is_refused_as_in_training(tmp_path: Path) -> None:
    plan, _ = make_plan(composed("experiment=feature_towers", "trainer.devices=2", name="plan"))
    swapped = tuple(replace(stage, devices=tuple(1 - device for device in stage.devices)) for stage in plan.stages)
    replace(plan, stages=swapped).save(tmp_path / "plan.yaml")
    settings = ("experiment=feature_towers", "trainer.devices=2", f"strategy.plan={tmp_path / 'plan.yaml'}")
    with pytest.raises(ConfigError, match=r"the user's step \('@step'\) on devices \(1,\); it must run on device 0"):
        make_plan(composed(*settings, name="plan"))


def test_pipelines_divide_the_devices() -> None:
    config = composed("experiment=gpt_text", "trainer.devices=8", "strategy.num_pipelines=4")
    assert make_plan(config)[0].num_devices == 2


def test_the_number_of_devices_is_configured_not_found() -> None:
    trainer = composed("experiment=gpt_text", "trainer.devices=4", "trainer.num_nodes=3").trainer
    assert num_processes(trainer) == 12
    assert num_processes(composed("experiment=gpt_text", "trainer.devices=[0,3]").trainer) == 2
    with pytest.raises(ConfigError, match="trainer.devices=auto must be a whole number"):
        num_processes(composed("experiment=gpt_text", "trainer.devices=auto").trainer)


def test_other_strategies_have_no_plan() -> None:
    with pytest.raises(ConfigError, match="gpp-plan plans for strategy=gpp, not for SingleDeviceStrategy"):
        make_plan(commands.composed("experiment=two_tower", "strategy=single_device", name="plan"))


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    make_plan(composed("experiment=feature_towers"))[0].save(path)
    with pytest.raises(PlanError, match=r"strategy.plan.* was made for another model"):
        make_plan(composed("experiment=feature_towers", "model.num_layers=2", f"strategy.plan={path}"))
