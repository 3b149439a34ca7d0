"""Training in stages from Lightning's own command line.

    python -m gpp_examples.lightning_cli fit --trainer.accelerator cpu --trainer.devices 2 \\
      --trainer.strategy lightning_gpp.GPPStrategy --trainer.strategy.num_micro_batches 4 --trainer.max_epochs 1

The arguments of the strategy are those of `GPPStrategy`; `--trainer.strategy gpp` has the default ones.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

import lightning_gpp  # noqa: F401  # registers the strategy "gpp"
from gpp_examples.feature_towers import BreastCancer, FeatureTowers


def main() -> None:
    LightningCLI(FeatureTowers, BreastCancer, save_config_callback=None)


if __name__ == "__main__":
    main()
