"""gpp-plan: predicts a run without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.cli.sizes import best_of_sizes, sizes_of
from lightning_gpp.errors import ConfigError
from lightning_gpp.planning import Prediction
from lightning_gpp.planning.assignment.layout_check import layout_mismatch
from lightning_gpp.reports import graph_svg, prediction_text, timeline_svg
from lightning_gpp.reports.page import report_html
from lightning_gpp.reports.terminal import show as show_text
from lightning_gpp.reports.terminal import terminal_width, wrapped
from lightning_gpp.simulation import trace_of
from lightning_gpp.training.replicas import idle_sharding


def show(config: DictConfig) -> None:
    """Print the plan, its timeline, memory and search; write the files that the settings name.

    Raises:
        ConfigError: the configuration cannot work.
        PlanError: nothing fits the devices.
    """
    if config.schedules is not None:
        raise ConfigError(
            f"schedules={config.schedules} is for gpp-plan compare, which has one row per schedule. Use gpp-plan "
            "compare schedules=..., or strategy.schedule=... for the schedule of one plan."
        )
    check_outputs(config, _OUTPUTS)
    task, prediction, compared = best_of_sizes(config)
    width = terminal_width()
    notes = (*_advice(prediction), *compared, *_members(prediction), *task.subject.notes)
    below = (f"\n{wrapped(note, width, 0)}" for note in notes)
    show_text("\n".join([prediction_text(prediction, width), *below]), prediction.plan)
    title = f"{config.name} on {task.machine.cluster.name}"
    write_outputs(
        config,
        {
            "output": prediction.plan.save,
            "timeline": prediction.drawn.save,
            "trace": trace_of(prediction.drawn).save,
            "svg": lambda path: path.write_text(timeline_svg(prediction.drawn)),
            "graph_svg": lambda path: path.write_text(graph_svg(prediction.plan)),
            "report": lambda path: path.write_text(report_html(prediction, title=title, notes=notes), encoding="utf-8"),
        },
    )


_OUTPUTS = ("output", "timeline", "trace", "svg", "graph_svg", "report")


def check_outputs(config: DictConfig, keys: Sequence[str]) -> None:
    """Refuse files that cannot be written, before a long search.

    Raises:
        ConfigError: the file that one of the keys names cannot be written, or is that of another key.
    """
    owners: dict[str, str] = {}
    for key in _given(config, keys):
        if owners.setdefault(config[key], key) != key:
            raise ConfigError(f"{key}={config[key]} is the file of {owners[config[key]]}, too. Give it another name.")
    for key in _given(config, keys):
        path = Path(config[key])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            existed = path.exists()
            path.open("a").close()
            if not existed:
                path.unlink()  # the plan writes it again
        except OSError as error:
            raise _unwritable(key, path, error) from error


def write_outputs(config: DictConfig, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Write the files that the settings name, each by the function of its key.

    Raises:
        ConfigError: a file cannot be written to its end.
    """
    for key in _given(config, writers):
        try:
            writers[key](Path(config[key]))
        except OSError as error:
            raise _unwritable(key, config[key], error) from error
        print(f"{key}: wrote {config[key]}")


def _given(config: DictConfig, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if config.get(key) is not None]


def _unwritable(key: str, path: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"{key}={path} cannot be written: {error.strerror}.")


def _members(prediction: Prediction) -> list[str]:
    """The meaning of figures of devices that are several processes."""
    plan, number = prediction.plan, prediction.num_pipelines
    *_, most = sizes = sizes_of(plan)
    if most == 1:
        return []
    what = f"{most} neighbouring processes" if len(sizes) == 1 else "one process or several neighbouring ones"
    return [
        f"Every device of the plan is {what} (tensor parallelism); parameters, FLOPs, activations and memory are those "
        f"of one of them. {number * plan.num_devices} devices are {number * plan.num_processes} processes."
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
