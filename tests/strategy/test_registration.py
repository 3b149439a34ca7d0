"""The name `gpp` of the strategy is known as soon as Lightning is loaded, and to the right Lightning."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import lightning_gpp
assert "torch" not in sys.modules
import pytorch_lightning
try:
    pytorch_lightning.Trainer(strategy="gpp", accelerator="cpu", devices=2)
except lightning_gpp.ConfigError as error:
    print(error)
from lightning.pytorch.strategies import StrategyRegistry
print(type(StrategyRegistry.get("gpp")).__name__)
"""


def test_each_package_of_lightning_knows_the_name() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    refusal, kind = done.stdout.splitlines()
    assert "import lightning.pytorch as pl" in refusal
    assert kind == "GPPStrategy"
