"""Models for tests: small `transformers` models from their config classes (no downloads), as LightningModules."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn


class Wrapped(L.LightningModule):
    """Any transformers model that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def _tokens(batch_size: int, length: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (batch_size, length), generator=generator)


def gpt2(batch_size: int = 8) -> tuple[Wrapped, dict[str, torch.Tensor], list[list[str]]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=64,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
        use_cache=False,
        **off,
    )
    ids = _tokens(batch_size, 12, 64)
    h = "model.transformer.h"
    stages = [
        ["model.transformer.wte", "model.transformer.wpe", f"{h}.0"],
        [f"{h}.1"],
        [f"{h}.2"],
        [f"{h}.3", "model.transformer.ln_f", "model.lm_head"],
    ]
    return Wrapped(GPT2LMHeadModel(config)), {"input_ids": ids, "labels": ids}, stages


def bert(batch_size: int = 8) -> tuple[Wrapped, dict[str, torch.Tensor], list[list[str]]]:
    from transformers import BertConfig, BertForSequenceClassification

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
        **off,
    )
    ids = _tokens(batch_size, 12, 64)
    mask = torch.ones_like(ids)
    mask[::2, 9:] = 0
    layer = "model.bert.encoder.layer"
    stages = [
        ["model.bert.embeddings", f"{layer}.0"],
        [f"{layer}.1"],
        [f"{layer}.2"],
        [f"{layer}.3", "model.bert.pooler", "model.classifier"],
    ]
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(batch_size) % 3}
    return Wrapped(BertForSequenceClassification(config)), batch, stages


def vit(batch_size: int = 8) -> tuple[Wrapped, dict[str, torch.Tensor], list[list[str]]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = Wrapped(ViTForImageClassification(config))
    images = torch.randn(batch_size, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layers = [
        name for name, _ in model.named_modules() if name.endswith((".0", ".1", ".2", ".3")) and name.count(".") <= 4
    ]
    layers = [name for name in layers if name.rpartition(".")[0] == layers[0].rpartition(".")[0]]
    stages = [
        ["model.vit.embeddings", layers[0]],
        [layers[1]],
        [layers[2]],
        [layers[3], "model.vit.layernorm", "model.classifier"],
    ]
    return model, {"pixel_values": images, "labels": torch.arange(batch_size) % 3}, stages


def clip(batch_size: int = 8) -> tuple[Wrapped, dict[str, torch.Tensor], list[list[str]]]:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = CLIPTextConfig(vocab_size=64, max_position_embeddings=12, eos_token_id=63, **tower)
    vision = CLIPVisionConfig(image_size=8, patch_size=4, **tower)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)

    class Contrastive(Wrapped):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch, return_loss=True).loss
            self.log("loss", loss)
            return loss

    ids = _tokens(batch_size, 12, 63)
    ids[:, -1] = 63
    images = torch.randn(batch_size, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stages = [
        ["model.vision_model"],
        ["model.text_model"],
        ["model.visual_projection", "model.text_projection"],
    ]
    return Contrastive(CLIPModel(config)), {"input_ids": ids, "pixel_values": images}, stages


def t5(batch_size: int = 8) -> tuple[Wrapped, dict[str, torch.Tensor], list[list[str]]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    ids = _tokens(batch_size, 10, 64)
    stages = [
        ["model.shared", "model.encoder.block.0"],
        ["model.encoder.block.1", "model.encoder.final_layer_norm"],
        ["model.decoder.block.0"],
        ["model.decoder.block.1", "model.decoder.final_layer_norm", "model.lm_head"],
    ]
    return Wrapped(T5ForConditionalGeneration(config)), {"input_ids": ids, "labels": ids[:, :6].clone()}, stages


MODELS: dict[str, Any] = {"gpt2": gpt2, "bert": bert, "vit": vit, "clip": clip, "t5": t5}
