"""The parts that the entries of the zoo share: made-up data, and modules around those of libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Entry = Callable[[], tuple[Any, ...]]
"""Builds a module with a `training_step`, a mini-batch and, if need be, options of the strategy."""

B = 4
"""Samples of a mini-batch."""

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_labels": 3,
}
"""What most configurations of `transformers` call the same."""

NO_DROPOUT = dict.fromkeys(
    (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "activation_dropout"),
        *("hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout_rate", "layerdrop", "drop_path_rate"),
        *("encoder_layerdrop", "decoder_layerdrop", "classifier_dropout_prob", "feat_proj_dropout", "final_dropout"),
        *(
            "seq_classif_dropout",
            "head_dropout",
            "semantic_classifier_dropout",
            "classifier_dropout",
            "embedding_dropout",
            "ff_dropout",
            "summary_last_dropout",
            "path_dropout",
        ),
    ),
    0.0,
)


def ids(length: int = 8, vocabulary: int = 32, samples: int = B, seed: int = 0) -> Tensor:
    """Token ids; none is a special token."""
    return torch.randint(4, vocabulary, (samples, length), generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 0, samples: int = B) -> Tensor:
    """Normally distributed numbers, one row per sample."""
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def images(size: int = 16, channels: int = 3) -> Tensor:
    return numbers(channels, size, size)


def labels(classes: int = 3) -> Tensor:
    return torch.arange(B) % classes


class LossInside(nn.Module):
    """Any model that computes its own loss."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def training_step(self, batch: Mapping[str, Any]) -> Tensor:
        loss: Tensor = self.model(**batch, **self.options).loss
        return loss


class LossOfStep(nn.Module):
    """A model that predicts; the step computes the loss from the first tensor of its output, or a named one."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], output: str | None = None) -> None:
        super().__init__()
        self.model, self.loss, self.output = model, loss, output

    def training_step(self, batch: tuple[Any, Any]) -> Tensor:
        x, y = batch
        out = self.model(**x) if isinstance(x, dict) else self.model(x)
        return self.loss(getattr(out, self.output) if self.output else out, y)


def classifier(model: nn.Module, x: Any, classes: int = 3, output: str | None = None) -> tuple[nn.Module, Any]:
    return LossOfStep(model, F.cross_entropy, output), (x, labels(classes))


def regression(model: nn.Module, x: Any, y: Tensor, output: str | None = None) -> tuple[nn.Module, Any]:
    return LossOfStep(model, F.mse_loss, output), (x, y)


def squared(out: Tensor, _: Any) -> Tensor:
    """A loss that needs no target; not even its shape."""
    return out.square().mean()


def next_token(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The loss of language models in `transformers`, without a cast to float32."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten())


def pretrained(
    name: str,
    config: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    *,
    head: str = "",
    configuration: str = "",
) -> Callable[[], tuple[nn.Module, Any]]:
    """An entry for the class `name + head` of `transformers`, with its configuration; `batch` has its arguments."""
    return partial(_pretrained, name, dict(config or {}), batch, head, configuration or f"{name}Config")


def _pretrained(
    name: str, config: dict[str, Any], batch: Mapping[str, Any] | None, head: str, configuration: str
) -> tuple[nn.Module, Any]:
    import transformers

    kind = getattr(transformers, configuration)
    known = kind().to_dict()
    common = {key: value for key, value in {**SIZES, **NO_DROPOUT}.items() if key in known or key == "num_labels"}
    common |= {key: 0 for key in NO_DROPOUT if type(known.get(key)) is int}  # some rates may only be integers
    made = kind(**{**common, **config})
    if getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 1
    model = getattr(transformers, name + head)(made)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if head in ("ForCausalLM", "LMHeadModel") and "vision_config" not in config:
        model.loss_function = next_token
    return LossInside(model), dict(batch or {})
