"""A model of Hugging Face that no rank has memory for starts from its files, of which each rank reads its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpp import load_pretrained, parameters_on_meta
from lightning_gpp.checkpoints import pretrained
from tests.strategy import harness
from tests.strategy.test_training import plain

transformers = pytest.importorskip("transformers")

LAYERS = 4
STAGES = [
    {"modules": ["net.model.embed_tokens", *(f"net.model.layers.{i}" for i in (0, 1))], "devices": [1]},
    {"modules": [*(f"net.model.layers.{i}" for i in (2, 3)), "net.model.norm", "net.lm_head", "@step"], "devices": [0]},
]


def configuration() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return transformers.LlamaConfig(**sizes, vocab_size=50, max_position_embeddings=16)


class Tuned(pl.LightningModule):
    def __init__(self, folder: str, on_meta: bool) -> None:
        super().__init__()
        self.folder, self.on_meta, self.net = folder, on_meta, None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is not None:
            return
        if not self.on_meta:
            self.net = transformers.LlamaForCausalLM.from_pretrained(self.folder)
            return
        with parameters_on_meta():
            self.net = transformers.LlamaForCausalLM(configuration())
        load_pretrained(self.net, self.folder)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch, use_cache=False).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(rank: int, folder: str, devices: int) -> list[float]:
    strategy = harness.strategy(stages=STAGES) if devices > 1 else "auto"
    module = Tuned(folder, on_meta=devices > 1)
    data = torch.randint(0, 50, (16, 12), generator=torch.Generator().manual_seed(3))
    harness.trainer(strategy, devices).fit(module, DataLoader(data, batch_size=8))
    return module.losses


def train_noting_keys(rank: int, folder: str) -> tuple[list[float], set[str]]:
    """In a process of its own: the losses, and the keys that this rank read."""
    read: set[str] = set()
    fill = pretrained._FileTensor.fill

    def noting(value: Any, tensor: Tensor) -> None:
        read.add(value.key)
        fill(value, tensor)

    pretrained._FileTensor.fill = noting
    return train(rank, folder, 2), read


def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(configuration()).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = plain(train, 0, str(tmp_path), 1)
    (losses, first), (others, second) = harness.run(2, train_noting_keys, str(tmp_path))
    assert losses == others == pytest.approx(expected, rel=1e-5)
    assert not first & second
    layers = [{key.split(".")[2] for key in keys if ".layers." in key} for keys in (first, second)]
    assert layers == [{"2", "3"}, {"0", "1"}]
    assert {"lm_head.weight", "model.norm.weight"} < first
    assert "model.embed_tokens.weight" in second
