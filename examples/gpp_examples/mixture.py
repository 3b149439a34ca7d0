"""A mixture of experts (Mixtral) that predicts the next byte of the documentation that comes with CPython.

The router sends each byte to two of its experts; the loss has a term that keeps them equally busy. Both come from
`transformers`.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from gpp_examples.common import one_cycle
from gpp_examples.gpt_text import NUM_BYTES


class Mixture(L.LightningModule):
    """Predicts the next byte.

    Stated quality: at most 1.7 nats per byte on the validation text with `experiment=mixture`.
    """

    def __init__(
        self,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        num_experts: int = 4,
        balance: float = 0.02,
        learning_rate: float = 4e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = MixtralConfig(
            vocab_size=NUM_BYTES,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            num_local_experts=num_experts,
            router_aux_loss_coef=balance,
            output_router_logits=True,
            use_cache=False,
        )
        self.model = MixtralForCausalLM(config)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (text,) = batch
        loss: Tensor = self.model(input_ids=text, labels=text).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("val/nats", self.nats(batch), prog_bar=True)

    def test_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("test/nats", self.nats(batch))

    def nats(self, batch: tuple[Tensor]) -> Tensor:
        """Mean cross-entropy per byte (a scalar), without the term for the experts."""
        (text,) = batch
        logits = self.model(input_ids=text).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return one_cycle(self)
