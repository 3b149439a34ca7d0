"""Vision: classification, segmentation, depth, masked images, detection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.acceptance.models.base import B, Entry, images, labels, numbers, pretrained

IMAGE = {"pixel_values": images(), "labels": labels()}
LARGE = {"pixel_values": images(32), "labels": labels()}
HEAD = "ForImageClassification"
_VIT = {"image_size": 16, "patch_size": 8}
_STAGED = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "image_size": 16, "patch_size": 2}


def _boxes() -> list[dict[str, Tensor]]:
    return [
        {"class_labels": torch.tensor([i % 3, 1]), "boxes": 0.2 + 0.1 * numbers(2, 4, seed=i)[0].abs().clamp(max=3)}
        for i in range(B)
    ]


def yolos() -> tuple[nn.Module, Any]:
    import PIL  # noqa: F401  # the loss of transformers lacks a function without it

    sizes = {**_VIT, "image_size": [16, 16], "num_detection_tokens": 4}
    module, batch = pretrained("Yolos", sizes, head="ForObjectDetection")()
    module.model.loss_function = partial(_in_single, module.model.loss_function)
    return module, {"pixel_values": images(), "labels": _boxes()}


def _in_single(loss: Callable[..., Any], logits: Tensor, labels: Any, device: Any, boxes: Tensor, *rest: Any) -> Any:
    """The loss makes weights of float32, whatever the model computes in."""
    labels = [{**label, "boxes": label["boxes"].float()} for label in labels]
    return loss(logits.float(), labels, device, boxes.float(), *rest)


MODELS: dict[str, Entry] = {
    "vit": pretrained("ViT", _VIT, IMAGE, head=HEAD),
    "deit": pretrained("DeiT", _VIT, IMAGE, head=HEAD),
    "beit": pretrained("Beit", {**_VIT, "use_relative_position_bias": True}, IMAGE, head=HEAD),
    "dinov2": pretrained("Dinov2", _VIT, IMAGE, head=HEAD),
    "swin": pretrained("Swin", _STAGED, IMAGE, head=HEAD),
    "swinv2": pretrained("Swinv2", _STAGED, IMAGE, head=HEAD),
    "convnext": pretrained("ConvNext", {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}, IMAGE, head=HEAD),
    "resnet": pretrained(
        "ResNet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        LARGE,
        head=HEAD,
    ),
    "mobilenet": pretrained("MobileNetV2", {"depth_multiplier": 0.1}, LARGE, head=HEAD),
    "segformer": pretrained(
        "Segformer",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "decoder_hidden_size": 16,
        },
        {"pixel_values": images(), "labels": torch.ones(B, 16, 16).long()},
        head="ForSemanticSegmentation",
    ),
    "mobilevit": pretrained(
        "MobileViT",
        {"image_size": 32, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 16, 16, 16]},
        LARGE,
        head=HEAD,
    ),
    "vit_mae": pretrained(
        "ViTMAE",
        {
            **_VIT,
            "mask_ratio": 0.5,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
        {"pixel_values": images(), "noise": numbers(4)},
        head="ForPreTraining",
    ),
    "yolos": yolos,
}
