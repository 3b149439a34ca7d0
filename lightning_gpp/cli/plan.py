"""`gpp-plan`: prints the plan of a run and its simulated timeline, without processes or devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from lightning_gpp.cli.app import Command, end_with_reader, run


def main() -> None:
    sys.argv[1:] = overrides(sys.argv[1:])
    run(
        Command(
            name="gpp-plan",
            config="plan",
            about="Plans a training run without its processes and devices: prints the stages, the simulated timeline "
            "of a mini-batch and the memory of every device. Takes the same configuration as gpp-train. gpp-plan "
            "compare has one row per partitioner, or per schedule.",
            examples=_EXAMPLES,
            task=plan,
        )
    )


_EXAMPLES = (
    ("gpp-plan experiment=two_tower output=plan.yaml", "The plan of a shipped example, written to a file."),
    ("gpp-plan experiment=two_tower cluster=t4_box", "The same for another machine, with four GPUs."),
    ("gpp-plan experiment=two_tower report=report.html", "The same as a page for the browser."),
    ("gpp-plan compare experiment=two_tower", "Partitioners side by side."),
    ("gpp-plan compare experiment=two_tower schedules=all", "Schedules side by side."),
)


def overrides(arguments: Sequence[str]) -> list[str]:
    """Arguments in Hydra's form: the word `compare` becomes a setting."""
    return ["compare=true" if argument == "compare" else argument for argument in arguments]


def plan(config: DictConfig) -> None:
    """Print the plan and its timeline and write the files that the settings name; or compare partitioners or schedules.

    Raises:
        ConfigError: the configuration cannot work.
        PlanError: nothing fits the devices.
    """
    # these take seconds to load, which refusals of wrong keys should not wait for
    from lightning_gpp.cli.compare import compare
    from lightning_gpp.cli.planning import show

    end_with_reader()
    (compare if config.compare else show)(config)


if __name__ == "__main__":
    main()
