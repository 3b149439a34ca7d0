"""`gpp-train`: one run, from the command line to a run folder with checkpoints, logs, plan and timeline."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gpp.cli.app import Command, run
from lightning_gpp.cli.check import refuse_multirun


def main() -> None:
    run(
        Command(
            name="gpp-train",
            config="train",
            about="Trains a LightningModule as a pipeline of stages that form a graph, and tests it. Model, data, "
            "trainer and strategy are configuration files; the run folder gets checkpoints, metrics, the plan and its "
            "simulated timeline.",
            examples=_EXAMPLES,
            task=train,
        )
    )


_EXAMPLES = (
    ("gpp-train experiment=two_tower", "A shipped example, on four processes of this machine's CPU."),
    ("gpp-train experiment=two_tower trainer=gpu", "The same on all GPUs of this machine."),
    ("gpp-train experiment=two_tower strategy=ddp", "The same with Lightning's data parallelism, to compare."),
    ("gpp-train experiment=two_tower debug=default", "A few batches only, to find mistakes."),
    ("gpp-train experiment=two_tower strategy.plan=plan.yaml", "With a plan that gpp-plan has written."),
    (
        "gpp-train data=mine model=mine --config-dir=configs",
        "Your own configs/data/mine.yaml and configs/model/mine.yaml.",
    ),
)


def train(config: DictConfig) -> None:
    """Train and test the configured model.

    Raises:
        ConfigError: the configuration cannot work.
    """
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        refuse_multirun(config.trainer.devices, config.trainer.num_nodes)
    from lightning_gpp.cli.job import run_job  # takes seconds to load, which refusals above should not wait for

    run_job(config)


if __name__ == "__main__":
    main()
