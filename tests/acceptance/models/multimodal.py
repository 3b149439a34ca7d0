"""Texts with images or sound: contrastive models, captions, documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.acceptance.models.base import (
    NO_DROPOUT,
    SIZES,
    B,
    Entry,
    LossInside,
    ids,
    images,
    labels,
    numbers,
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


def clap() -> tuple[nn.Module, Any]:
    from transformers import ClapConfig, ClapModel

    audio = {
        "spec_size": 16,
        "num_mel_bins": 8,
        "patch_size": 2,
        "patch_stride": [2, 2],
        "window_size": 2,
        "hidden_size": 16,
        "patch_embeds_hidden_size": 8,
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "projection_dim": 8,
        "drop_path_rate": 0.0,
    }
    text = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
    config = ClapConfig(text_config=text, audio_config=audio, projection_dim=8)
    batch = {"input_ids": ids(), "input_features": numbers(1, 32, 8)}
    return LossInside(ClapModel(config), return_loss=True), batch


def llava() -> tuple[nn.Module, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "use_cache": False})
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_IMAGE), text_config=text, image_token_index=3, vision_feature_layer=-1
    )
    tokens = ids(10)
    tokens[:, 1:5] = 3
    batch = {"input_ids": tokens, "pixel_values": images(), "labels": tokens}
    return LossInside(LlavaForConditionalGeneration(config)), batch


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


def vision_encoder_decoder() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    encoder = ViTConfig(**{**_IMAGE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    decoder = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        add_cross_attention=True,
        is_decoder=True,
        use_cache=False,
        eos_token_id=2,
        bos_token_id=1,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return LossInside(VisionEncoderDecoderModel(config)), {"pixel_values": images(), "labels": ids(6)}


def _places() -> torch.Tensor:
    corners = ids(8, 400)[..., None].repeat(1, 1, 4)
    corners[..., 2:] += 20
    return corners


MODELS: dict[str, Entry] = {
    "clip": _contrastive("CLIP"),
    "siglip": _contrastive("Siglip"),
    "altclip": _contrastive("ChineseCLIP"),
    "clap": clap,
    "llava": llava,
    "blip": blip,
    "vision_encoder_decoder": vision_encoder_decoder,
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
