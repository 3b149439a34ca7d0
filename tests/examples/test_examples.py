"""The examples' data and models: shapes, what captions say, and that each learns."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from gpp_examples.feature_towers import BreastCancer, FeatureTowers
from gpp_examples.gpt_text import GPT, PythonTopics
from gpp_examples.local_digits import Digits, LocalDigits
from gpp_examples.two_tower import CAPTION_BYTES, CaptionedDigits, TwoTower, caption

EXAMPLES = {
    "two_tower": (TwoTower, CaptionedDigits),
    "feature_towers": (FeatureTowers, BreastCancer),
    "gpt_text": (GPT, PythonTopics),
    "local_digits": (LocalDigits, Digits),
}


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> tuple[L.LightningModule, L.LightningDataModule]:
    torch.manual_seed(0)
    module, datamodule = EXAMPLES[request.param]
    data = datamodule()
    data.setup("fit")
    return module(), data


def test_a_caption_names_the_label_and_is_padded() -> None:
    text = bytes(caption(7, 1))
    assert text.rstrip(b"\0") == b"the number seven"
    assert len(text) == CAPTION_BYTES
    assert len({tuple(caption(label, template)) for label in range(10) for template in range(6)}) == 60


@pytest.mark.parametrize("loader", ["train_dataloader", "val_dataloader", "test_dataloader"])
def test_the_loss_of_a_batch_is_finite_in_float64(
    example: tuple[L.LightningModule, L.LightningDataModule], loader: str
) -> None:
    model, data = example
    batch = next(iter(getattr(data, loader)()))
    batch = [value.double() if value.is_floating_point() else value for value in batch]
    model.double().log = lambda *_, **__: None
    loss = model.training_step(batch, 0)
    assert loss.dtype is torch.float64
    assert loss.isfinite()


def test_a_few_steps_lower_the_loss(example: tuple[L.LightningModule, L.LightningDataModule]) -> None:
    model, data = example
    batch = next(iter(DataLoader(data.training, 16)))
    model.log = lambda *_, **__: None
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_feature_towers_reach_the_stated_quality() -> None:
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        max_epochs=15,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = FeatureTowers(), BreastCancer()
    trainer.fit(model, data)
    assert trainer.test(model, data, verbose=False)[0]["test/accuracy"] >= 0.95
