"""Predicts a run without running it: the work of `gpp-plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.cli.task import predict, task_of
from lightning_gpp.errors import ConfigError
from lightning_gpp.planning import Prediction
from lightning_gpp.planning.assignment.layout import layout_mismatch
from lightning_gpp.reports import prediction_text, terminal_width
from lightning_gpp.reports.report import report_html
from lightning_gpp.reports.terminal import wrapped
from lightning_gpp.simulation import trace_of
from lightning_gpp.training.tensors.replicas import idle_sharding

OUTPUTS = ("output", "trace", "report")
"""Settings that name a file to write."""


def show(config: DictConfig) -> None:
    """Print the plan, its timeline, memory and search; write the files that the settings name.

    Raises:
        ConfigError: the configuration cannot work.
        PlanError: nothing fits the devices.
    """
    if config.schedules is not None:
        raise ConfigError(
            f"schedules={config.schedules} is for gpp-plan compare, which has one row per schedule. Use gpp-plan "
            "compare."
        )
    files = _files(config)
    task = task_of(config)
    prediction = predict(task)
    width = terminal_width()
    notes = (*_advice(prediction), *_members(prediction), *task.subject.notes)
    title = f"{config.name} on {task.machine.cluster.name}"
    writers: dict[str, Callable[[Path], object]] = {
        "output": prediction.plan.save,
        "trace": trace_of(prediction.drawn).save,
        "report": lambda path: path.write_text(report_html(prediction, title=title, notes=notes), encoding="utf-8"),
    }
    for key, path in files.items():
        writers[key](path)
    print("\n".join([prediction_text(prediction, width), *(f"\n{wrapped(note, width, 0)}" for note in notes)]))
    print("".join(f"{key}: wrote {path}\n" for key, path in files.items()), end="")


def _files(config: DictConfig) -> dict[str, Path]:
    """The files to write, which are looked at before a long search.

    Raises:
        ConfigError: a file cannot be written.
    """
    files = {key: Path(config[key]) for key in OUTPUTS if config[key] is not None}
    for key, path in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{key}={path} cannot be written: {error.strerror}.") from error
    return files


def _members(prediction: Prediction) -> list[str]:
    """The meaning of figures of devices that are several processes."""
    plan, number = prediction.plan, prediction.num_pipelines
    if plan.tensor_parallel_size == 1:
        return []
    return [
        f"Every device of the plan is {plan.tensor_parallel_size} neighbouring processes (tensor parallelism); "
        "parameters, FLOPs, activations and memory are those of one of them. "
        f"{number * plan.num_devices} devices are {number * plan.num_processes} processes."
    ]


def _advice(prediction: Prediction) -> list[str]:
    """Drawbacks of schedule and sharding for this plan, and how to train with several pipelines."""
    number, plan = prediction.num_pipelines, prediction.plan
    reason = layout_mismatch(plan, plan.schedule)
    idle = idle_sharding(plan, number)
    notes = [*([f"{plan.schedule}: {reason}"] if reason else []), *([idle] if idle else [])]
    if number == 1:
        return notes
    return [
        *notes,
        f"{number} pipelines of {plan.num_devices} devices each share the work: train with "
        f"strategy.num_pipelines={number}. A data loader's batch is that of one pipeline: {plan.batch_size} samples, "
        f"{number * plan.batch_size} in total.",
    ]
