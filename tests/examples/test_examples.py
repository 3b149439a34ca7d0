"""The examples' data and models: shapes, what captions say, and that each learns."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

from gpp_examples.feature_towers import BreastCancer, FeatureTowers
from gpp_examples.gpt_text import GPT, PythonTopics
from gpp_examples.two_tower import CAPTION_BYTES, WORDS, CaptionedDigits, TwoTower, caption
from lightning_gpp.capture import capture_step

EXAMPLES = {
    "two_tower": (TwoTower, CaptionedDigits),
    "feature_towers": (FeatureTowers, BreastCancer),
    "gpt_text": (GPT, PythonTopics),
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


def test_half_of_the_captions_match_their_image() -> None:
    data = CaptionedDigits()
    data.setup("fit")
    images, captions, matches = data.training.tensors
    assert images.shape == (1197 * 4, 1, 8, 8)
    assert matches.mean() == 0.5
    labels = {image.tobytes(): label for image, label in zip(*load_digits(return_X_y=True), strict=True)}
    for image, text, match in list(zip(images, captions, matches, strict=True))[:200]:
        label = labels[(image * 16).double().flatten().numpy().tobytes()]
        assert (WORDS[label].encode() in bytes(text.tolist())) == bool(match)


def test_the_parts_of_the_data_are_apart() -> None:
    data = BreastCancer()
    data.setup("fit")
    sizes = [len(part) for part in (data.training, data.validation, data.test)]
    assert sizes == [369, 80, 120]
    assert torch.allclose(torch.cat(data.training.tensors[:3], 1).mean(0), torch.zeros(30), atol=1e-5)


def test_text_windows_overlap_by_the_predicted_byte() -> None:
    data = PythonTopics(context=16)
    data.setup("fit")
    (windows,) = data.training.tensors
    assert windows.shape[1] == 17
    assert torch.equal(windows[:-1, -1], windows[1:, 0])


def test_the_head_of_the_gpt_is_its_embedding() -> None:
    model = GPT()
    assert model.head.weight is model.embedding.weight


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


@pytest.mark.parametrize("step", ["training_step", "validation_step", "test_step"])
def test_every_step_is_captured_with_what_it_reads(
    example: tuple[L.LightningModule, L.LightningDataModule], step: str
) -> None:
    model, data = example
    captured = capture_step(model, next(iter(data.train_dataloader())), step=step)
    (logits,) = captured.network.needed
    assert captured.network.calls[logits.call].outputs[logits.output][0][0] > 0


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
