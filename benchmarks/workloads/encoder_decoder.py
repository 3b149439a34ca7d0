"""An encoder-decoder Transformer: every layer of the decoder reads the result of the encoder."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.workloads.layers import Attention, Block, FeedForward, Trained, next_token_loss
from benchmarks.workloads.workload import Built, Workload

WIDTH, NUM_HEADS, HIDDEN, NUM_LAYERS, VOCABULARY, LENGTH = 1024, 16, 4096, 24, 32128, 512


class CrossBlock(nn.Module):
    """A pre-norm decoder layer: causal attention, attention on the encoder's result, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention(WIDTH, NUM_HEADS, causal=True)
        self.cross_norm, self.cross = nn.RMSNorm(WIDTH), Attention(WIDTH, NUM_HEADS)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(WIDTH), FeedForward(WIDTH, HIDDEN)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.cross(self.cross_norm(x), memory)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, NUM_HEADS, HIDDEN) for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(CrossBlock() for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


class EncoderDecoder(Trained):
    """T5 large without its relative positions. Both embeddings and the head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.decoder.embedding.weight = self.encoder.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.decoder(target, self.encoder(source)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        source, target = batch
        return next_token_loss(self(source, target[:, :-1]), target[:, 1:])


def build(batch_size: int) -> Built:
    tokens = torch.empty(batch_size, LENGTH, dtype=torch.long)
    return EncoderDecoder(), (tokens, torch.empty(batch_size, LENGTH + 1, dtype=torch.long))


def encoder_decoder(batch_size: int = 128) -> Workload:
    return Workload(
        name="encoder_decoder",
        build=partial(build, batch_size),
        batch_size=batch_size,
        source="sizes of T5 large (arXiv 1910.10683, section 3.7), sequences of 512, batches of 128 (section 3.1.2)",
    )
