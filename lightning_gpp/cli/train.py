"""`gpp-train`: one run, from the command line to a run folder with checkpoint, log, plan and timeline."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig

from lightning_gpp.cli.app import run
from lightning_gpp.cli.build import Job, build
from lightning_gpp.cli.check import refuse_multirun


def main() -> None:
    run("gpp-train", "train", train)


def train(config: DictConfig) -> None:
    """Train and test as the configuration says.

    Raises:
        ConfigError: the configuration cannot work.
    """
    is_multirun = HydraConfig.get().mode is RunMode.MULTIRUN
    job = build(config)
    refuse_multirun(is_multirun, job.trainer.num_devices * job.trainer.num_nodes)
    if config.train:
        job.trainer.fit(job.model, datamodule=job.datamodule, ckpt_path=config.ckpt_path)
    if config.test and not job.trainer.interrupted:
        test(job, None if config.train else config.ckpt_path)
    finish(config)


def test(job: Job, ckpt_path: str | None) -> None:
    """Test the best checkpoint of this run, else the given one, else the model as it is."""
    callback = job.trainer.checkpoint_callback
    best = getattr(callback, "best_model_path", "") or ckpt_path
    job.trainer.test(job.model, datamodule=job.datamodule, ckpt_path=best or None)


@rank_zero_only
def finish(config: DictConfig) -> None:
    print(f"Run folder: {config.paths.output_dir}")


if __name__ == "__main__":
    main()
