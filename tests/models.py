"""Models of `transformers` in stages, for tests."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from tests.acceptance.models.base import Entry, ids, numbers, pretrained
from tests.acceptance.models.multimodal import MODELS as MULTIMODAL

SAMPLES = 8
_LABELS = torch.arange(SAMPLES) % 3
_TOKENS = {"input_ids": ids(12, samples=SAMPLES), "labels": ids(12, samples=SAMPLES)}
_MASK = torch.ones(SAMPLES, 12, dtype=torch.long)
_MASK[::2, 9:] = 0
_ENTRIES: dict[str, Entry] = {
    "gpt2": pretrained(
        "GPT2", {"n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}, _TOKENS, head="LMHeadModel"
    ),
    "bert": pretrained(
        "Bert",
        {"num_hidden_layers": 4},
        {"input_ids": _TOKENS["input_ids"], "attention_mask": _MASK, "labels": _LABELS},
        head="ForSequenceClassification",
    ),
    "vit": pretrained(
        "ViT",
        {"image_size": 8, "patch_size": 4, "num_hidden_layers": 4},
        {"pixel_values": numbers(3, 8, 8, samples=SAMPLES), "labels": _LABELS},
        head="ForImageClassification",
    ),
    "clip": MULTIMODAL["clip"],
    "t5": pretrained(
        "T5",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        {"input_ids": ids(10, samples=SAMPLES), "labels": ids(6, samples=SAMPLES)},
        head="ForConditionalGeneration",
    ),
}
_STAGES = {
    "gpt2": ["wte wpe h.0", "h.1", "h.2", "h.3 ln_f lm_head"],
    "bert": ["embeddings layer.0", "layer.1", "layer.2", "layer.3 pooler classifier"],
    "vit": ["embeddings layers?.0", "layers?.1", "layers?.2", "layers?.3 layernorm classifier"],
    "clip": ["vision_model", "text_model", "visual_projection text_projection"],
    "t5": [
        "shared encoder.block.0",
        "encoder.block.1 encoder.final_layer_norm",
        "decoder.block.0",
        "decoder.block.1 decoder.final_layer_norm lm_head",
    ],
}
"""Expressions for the ends of paths; there is one path for each."""


class Steps(nn.Module):
    """A module of the zoo, with a step as Lightning calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model.training_step(batch)  # type: ignore[operator]
        return loss


def in_stages(name: str) -> tuple[nn.Module, Any, list[list[str]]]:
    """A model, its mini-batch, and its modules by stage."""
    model, batch = _ENTRIES[name]()
    module = Steps(model).double()
    paths = sorted((path for path, _ in module.named_modules()), key=len)

    def path_of(end: str) -> str:
        return next(path for path in paths if re.search(rf"\.{end}$", path))

    return module, batch, [[path_of(end) for end in ends.split()] for ends in _STAGES[name]]


NAMES = tuple(_ENTRIES)
