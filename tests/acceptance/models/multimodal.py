"""Texts with images or sound: contrastive models, captions, documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.acceptance.models.base import (
    NO_DROPOUT,
    B,
    Entry,
    LossInside,
    ids,
    images,
    labels,
    pretrained,
)

_TOWER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {**_TOWER, "vocab_size": 32, "max_position_embeddings": 16, "projection_dim": 8, "eos_token_id": 2}
_IMAGE = {**_TOWER, "image_size": 16, "patch_size": 8, "projection_dim": 8}
PAIR = {"input_ids": ids(), "pixel_values": images()}


def _contrastive(name: str) -> Entry:
    def build() -> tuple[nn.Module, Any]:
        import transformers

        config = getattr(transformers, f"{name}Config")(
            text_config={**_TEXT, **NO_DROPOUT}, vision_config=_IMAGE, projection_dim=8
        )
        model = getattr(transformers, f"{name}Model")(config)
        return LossInside(model, return_loss=True), PAIR

    return build


def blip() -> tuple[nn.Module, Any]:
    from transformers import BlipConfig, BlipForConditionalGeneration

    text = {
        **_TEXT,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
        "encoder_hidden_size": 16,
        "bos_token_id": 1,
        "sep_token_id": 2,
        "label_smoothing": 0.0,
    }
    config = BlipConfig(text_config=text, vision_config=_IMAGE, projection_dim=8)
    return LossInside(BlipForConditionalGeneration(config)), {**PAIR, "labels": ids()}


def _places() -> torch.Tensor:
    corners = ids(8, 400)[..., None].repeat(1, 1, 4)
    corners[..., 2:] += 20
    return corners


MODELS: dict[str, Entry] = {
    "clip": _contrastive("CLIP"),
    "siglip": _contrastive("Siglip"),
    "altclip": _contrastive("ChineseCLIP"),
    "blip": blip,
    "vilt": pretrained(
        "Vilt",
        {"image_size": 16, "patch_size": 8, "max_image_length": -1},
        {
            "input_ids": ids(),
            "pixel_values": images(),
            "pixel_mask": torch.ones(B, 16, 16).long(),
            "labels": torch.nn.functional.one_hot(labels(), 3).double(),
        },
        head="ForQuestionAnswering",
    ),
    "layoutlm": pretrained(
        "LayoutLM",
        {"max_2d_position_embeddings": 512},
        {"input_ids": ids(), "bbox": _places(), "labels": labels()},
        head="ForSequenceClassification",
    ),
    "git": pretrained("Git", {"vision_config": _IMAGE}, {**PAIR, "labels": ids()}, head="ForCausalLM"),
}
