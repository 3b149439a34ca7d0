"""`gpp-train`: one run, from the command line to a run folder with checkpoint, log, plan and timeline."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gpp.cli.app import run
from lightning_gpp.cli.check import refuse_multirun


def main() -> None:
    run("gpp-train", "train", train)


def train(config: DictConfig) -> None:
    """Train and test as the configuration says.

    Raises:
        ConfigError: the configuration cannot work.
    """
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        refuse_multirun(config.trainer.devices, config.trainer.num_nodes)
    from lightning_gpp.cli.job import run_job  # takes seconds to load; what is refused above need not wait for it

    run_job(config)


if __name__ == "__main__":
    main()
