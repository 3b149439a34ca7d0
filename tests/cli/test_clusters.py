"""`gpp-plan` for clusters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightning_gpp.cli.planning import show
from lightning_gpp.cli.task import device_type, task_of
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.plan import Plan
from tests.cli.commands import composed, make_plan

QUICK = ("experiment=two_tower", "strategy=gpp", "strategy.search_seconds=0.5")


def test_all_devices_of_a_cluster_are_used() -> None:
    task = task_of(composed(*QUICK, "cluster=dgx_h100", "cluster.num_nodes=2", name="plan"))
    assert (task.machine.cluster.num_devices, task.num_devices, task.num_pipelines) == (16, 16, None)
    assert {device.name for device in task.machine.cluster.devices} == {"h100_sxm"}
    assert task.machine.footprint.optimizer == "adamw"  # although it asks the trainer for the number of steps
    every = "strategy.idle_devices=false"
    plan, timeline = make_plan(composed(*QUICK, "cluster=dgx_h100", "cluster.num_nodes=2", every, name="plan"))
    assert 16 % plan.num_devices == 0
    assert len(timeline.devices) == plan.num_devices


def test_several_pipelines_are_said_clearly(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("strategy.max_replicas=1", "strategy.num_micro_batches=4")
    show(composed(*QUICK, *fixed, "cluster=cpu_host", "cluster.num_devices=64", "trainer.devices=1", name="plan"))
    text = capsys.readouterr().out
    match = re.search(
        r"(\d+) pipelines of (\d+) devices each share the work: train with strategy.num_pipelines=(\d+)", text
    )
    assert match, text
    number, devices, again = map(int, match.groups())
    assert number == again > 1
    assert number * devices == 64
    assert f"{64 // number} samples, 64 in total" in text


def test_the_strategy_s_own_cluster_counts_without_one() -> None:
    mapping = "{preset: t4_box, num_devices: 3}"
    task = task_of(composed(*QUICK, f"strategy.cluster={mapping}", "trainer.devices=auto", name="plan"))
    assert (task.machine.cluster.num_devices, task.num_pipelines) == (3, 1)
    task = task_of(composed(*QUICK, "strategy.cluster=summit", "trainer.devices=6", name="plan"))
    assert (task.machine.cluster.name, task.machine.cluster.num_devices) == ("summit", 6)
    with pytest.raises(ConfigError, match=r"'t4_box' \(strategy.cluster\) has 3 devices, the job needs 4"):
        task_of(composed(*QUICK, f"strategy.cluster={mapping}", "trainer.devices=4", name="plan"))


def test_a_plan_for_more_devices_than_the_cluster_has(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    make_plan(composed("experiment=two_tower", "strategy.search_seconds=0.5", name="plan"))[0].save(path)
    config = composed(*QUICK, "cluster=t4_box", "cluster.num_devices=3", f"strategy.plan={path}", name="plan")
    with pytest.raises(PlanError, match="The plan needs 4 devices, the job has 3"):
        make_plan(config)
    twice = composed(*QUICK, "cluster=t4_box", "cluster.num_nodes=2", f"strategy.plan={path}", name="plan")
    assert make_plan(twice)[0] == Plan.load(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs to plan for")
def test_gpus_that_are_not_there() -> None:
    with pytest.raises(
        ConfigError, match="trainer.accelerator=gpu, but this machine has no GPU to plan for. .*cluster="
    ):
        task_of(composed(*QUICK, "trainer.accelerator=gpu", name="plan"))
    assert [device_type(name) for name in ("auto", "cpu", "gpu", "cuda")] == ["cpu", "cpu", "cuda", "cuda"]


def test_costs_are_measured_in_a_training_run() -> None:
    with pytest.raises(ConfigError, match="costs=measured times the model in its training run: gpp-train writes"):
        task_of(composed("experiment=feature_towers", "strategy.costs=measured", name="plan"))
