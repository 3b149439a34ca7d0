"""`gpp-train`: one run, from the command line to a run folder with checkpoints, logs, plan and timeline."""

from __future__ import annotations

from omegaconf import DictConfig

from lightning_gpp.cli.app import Command, run
from lightning_gpp.cli.sweep import is_sweep, optimized, run_alone


def main() -> None:
    run(_COMMAND)


_EXAMPLES = (
    ("gpp-train experiment=two_tower", "A shipped example, on four processes of this machine's CPU."),
    ("gpp-train experiment=two_tower trainer=gpu", "The same on all GPUs of this machine."),
    ("gpp-train experiment=two_tower strategy=ddp", "The same with Lightning's data parallelism, to compare."),
    ("gpp-train experiment=two_tower debug=default", "A few batches only, to find mistakes."),
    ("gpp-train experiment=two_tower strategy.plan=plan.yaml", "With a plan that gpp-plan has written."),
    (
        "gpp-train --multirun experiment=two_tower seed=1,2,3",
        "A sweep: one run after the other; Hydra's launchers and sweepers work, too (optimized_metric).",
    ),
    (
        "gpp-train data=mine model=mine --config-dir=configs",
        "Your own configs/data/mine.yaml and configs/model/mine.yaml.",
    ),
)


_ABOUT = (
    "Trains a LightningModule as a pipeline of stages that form a graph, and tests it. Model, data, trainer and "
    "strategy are configuration files; the run folder gets checkpoints, metrics, the plan and its simulated timeline."
)


def train(config: DictConfig) -> float | None:
    """Train and test the configured model. Returns the metric that `optimized_metric` names, for sweepers.

    Raises:
        ConfigError: the configuration cannot work.
    """
    if is_sweep():
        return optimized(run_alone(config), config.optimized_metric)
    from lightning_gpp.cli.job import run_job  # takes seconds to load, which refusals above should not wait for

    return optimized(run_job(config), config.optimized_metric)


_COMMAND = Command(name="gpp-train", config="train", about=_ABOUT, examples=_EXAMPLES, task=train)

if __name__ == "__main__":
    main()
