"""`lightning.pytorch` and `pytorch_lightning` are one package in a process that uses this library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import PATIENCE

SAME = """
from pytorch_lightning.callbacks import EarlyStopping
import lightning_fabric
assert pl.Trainer is L.Trainer
assert EarlyStopping is L.pytorch.callbacks.EarlyStopping
assert lightning_fabric.Fabric is L.Fabric
assert isinstance(pl.Trainer(strategy="gpp", accelerator="cpu", logger=False).strategy, lightning_gpp.GPPStrategy)
print(pl.__name__, pl.__spec__.name, pl.strategies.__spec__.name)
"""

TRAINS = """
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_gpp import GPPStrategy

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = self.last(self.first(batch[0]).relu()).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def losses(**kwargs):
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, **kwargs
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.linspace(0, 1, 64).reshape(16, 4)), batch_size=8))
    return trainer.callback_metrics["loss"].item()

if __name__ == "__main__":
    expected = losses(devices=1)
    found = losses(devices=2, strategy=GPPStrategy(num_micro_batches=2))
    assert abs(found - expected) < 1e-6 * expected, (found, expected)
"""


def run(script: str, folder: Path) -> str:
    path = folder / "script.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path)], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("imports", "first"),
    [
        ("import lightning_gpp\nimport pytorch_lightning as pl\nimport lightning as L", "pytorch_lightning"),
        pytest.param(
            "import lightning_gpp\nimport lightning as L\nimport pytorch_lightning as pl",
            "lightning.pytorch",
            marks=pytest.mark.acceptance,
        ),
        pytest.param(
            "import pytorch_lightning as pl\nimport lightning_gpp\nimport lightning as L",
            "pytorch_lightning",
            marks=pytest.mark.acceptance,
        ),
    ],
)
def test_the_name_that_is_loaded_first_is_both(imports: str, first: str, tmp_path: Path) -> None:
    assert run(f"{imports}\n{SAME}", tmp_path).splitlines()[-1].split() == [first, first, f"{first}.strategies"]


@pytest.mark.acceptance
def test_packages_that_were_loaded_apart_stay_apart(tmp_path: Path) -> None:
    script = "import pytorch_lightning as pl\nimport lightning as L\nimport lightning_gpp\n"
    run(f"{script}assert pl.Trainer is not L.Trainer\nassert 'gpp' in L.pytorch.strategies.StrategyRegistry", tmp_path)


@pytest.mark.acceptance
def test_a_module_of_pytorch_lightning_trains_in_stages(tmp_path: Path) -> None:
    run(TRAINS, tmp_path)
