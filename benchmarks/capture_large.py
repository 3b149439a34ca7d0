"""Time and memory to capture a GPT with 49 billion parameters on the meta device.

python benchmarks/capture_large.py [layers] [width]
"""

from __future__ import annotations

import resource
import sys
import time

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpp.capture import capture_step


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(L.LightningModule):
    """A GPT with tied embedding and head."""

    def __init__(self, num_layers: int, width: int, vocabulary: int = 50304, context: int = 2048) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 128) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    num_layers, width = (int(argument) for argument in (*sys.argv[1:], 48, 9216)[:2])
    with torch.device("meta"):
        module = GPT(num_layers, width)
        batch = torch.zeros(8, 2049, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    captured = capture_step(module, batch)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = sum(parameter.numel() for parameter in module.parameters()) / 1e9
    flops = sum(operator.flops.at(1) for operator in captured.graph) / 1e12
    print(f"{parameters:.1f} billion parameters, {len(captured.graph)} operators, {flops:.0f} TFLOP forward per sample")
    print(
        f"captured in {seconds:.1f} s; peak memory of the process {after / 1e3:.0f} MB ({before / 1e3:.0f} MB before)"
    )


if __name__ == "__main__":
    main()
