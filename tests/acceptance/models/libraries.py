"""Models of torchvision, timm, diffusers and peft."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.acceptance.models.base import (
    SIZES,
    B,
    Entry,
    LossInside,
    classifier,
    images,
    next_token,
    numbers,
    regression,
)
from tests.acceptance.models.text import LM, SEQ2SEQ


def _torchvision(name: str, size: int, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return partial(_of_torchvision, name, size, options)


def _of_torchvision(name: str, size: int, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    from torchvision import models

    model = getattr(models, name)(**{"num_classes": 3, **options})
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return classifier(model, images(size))


def _timm(name: str, size: int, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return partial(_of_timm, name, size, options)


def _of_timm(name: str, size: int, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    import timm

    return classifier(timm.create_model(name, num_classes=3, **options), images(size))


class Denoises(nn.Module):
    """A diffusion model; the batch has the noise and the times."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        batch = dict(batch)
        noise = batch.pop("noise")
        first, clean = next(iter(batch.items()))
        batch[first] = clean + 0.1 * noise
        return F.mse_loss(self.model(**batch).sample, noise)


def _diffusers(name: str, batch: dict[str, Tensor], **config: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return partial(_of_diffusers, name, batch, config)


def _of_diffusers(name: str, batch: dict[str, Tensor], config: dict[str, Any]) -> tuple[nn.Module, Any]:
    import diffusers

    return Denoises(getattr(diffusers, name)(**config)), batch


def _autoencoder() -> tuple[nn.Module, Any]:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2)
    return regression(model, images(), images(), output="sample")


_TIMES = torch.arange(B) + 1
_UNET = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}


def _adapted(kind: str, base: str, task: str, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return partial(_of_peft, kind, base, task, options)


def _of_peft(kind: str, base: str, task: str, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    import peft
    import transformers

    if base == "T5":
        config: Any = transformers.T5Config(
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            vocab_size=32,
            decoder_start_token_id=0,
            dropout_rate=0.0,
            use_cache=False,
        )
        model: Any = transformers.T5ForConditionalGeneration(config)
    else:
        config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
        model = transformers.LlamaForCausalLM(config)
    if base != "T5":
        model.loss_function = next_token
    adapted = peft.get_peft_model(model, getattr(peft, kind)(task_type=task, **options))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:  # those that start at zero would hide errors
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return LossInside(adapted), SEQ2SEQ if base == "T5" else LM


MODELS: dict[str, Entry] = {
    "torchvision_resnet18": _torchvision("resnet18", 32),
    "torchvision_squeezenet": _torchvision("squeezenet1_1", 32),
    "torchvision_googlenet": _torchvision("googlenet", 32, init_weights=False, aux_logits=False),
    "torchvision_efficientnet": _torchvision("efficientnet_b0", 32, stochastic_depth_prob=0.0),
    "timm_vit": _timm("vit_tiny_patch16_224", 16, img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2),
    "timm_convnext": _timm("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "timm_resnet": _timm("resnet10t", 32),
    "timm_swin": _timm(
        "swin_tiny_patch4_window7_224",
        16,
        img_size=16,
        patch_size=2,
        window_size=2,
        embed_dim=8,
        depths=(1, 1),
        num_heads=(1, 2),
        drop_path_rate=0.0,
    ),
    "timm_nfnet": _timm("nf_resnet26", 32),
    "timm_xcit": _timm("xcit_nano_12_p16_224", 32, img_size=32, embed_dim=16, depth=2, num_heads=2),
    "diffusers_conditional_unet": _diffusers(
        "UNet2DConditionModel",
        {
            "sample": numbers(4, 8, 8),
            "timestep": _TIMES,
            "encoder_hidden_states": numbers(5, 8),
            "noise": numbers(4, 8, 8, seed=1),
        },
        **_UNET,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    ),
    "diffusers_sd3": _diffusers(
        "SD3Transformer2DModel",
        {
            "hidden_states": numbers(4, 8, 8),
            "encoder_hidden_states": numbers(5, 8),
            "pooled_projections": numbers(8),
            "timestep": _TIMES,
            "noise": numbers(4, 8, 8, seed=1),
        },
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    "diffusers_autoencoder": _autoencoder,
    "peft_lora": _adapted("LoraConfig", "Llama", "CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2),
    "peft_dora": _adapted("LoraConfig", "Llama", "CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2, use_dora=True),
    "peft_ia3": _adapted("IA3Config", "T5", "SEQ_2_SEQ_LM"),
    "peft_prefix": _adapted("PromptTuningConfig", "Llama", "CAUSAL_LM", num_virtual_tokens=3),
    "peft_lora_t5": _adapted("LoraConfig", "T5", "SEQ_2_SEQ_LM", target_modules=["q", "v"], r=2),
}
