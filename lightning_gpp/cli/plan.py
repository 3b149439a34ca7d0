"""`gpp-plan`: the plan of a run and its simulated timeline, without processes and without the devices."""

from __future__ import annotations

from omegaconf import DictConfig

from lightning_gpp.cli.app import run


def main() -> None:
    run("gpp-plan", "plan", plan)


def plan(config: DictConfig) -> None:
    """Print the plan and its timeline; write the files that `output`, `timeline` and `svg` name.

    Raises:
        ConfigError: the configuration cannot work.
    """
    from lightning_gpp.cli.planning import show  # takes seconds to load; a wrong key need not wait for it

    show(config)


if __name__ == "__main__":
    main()
