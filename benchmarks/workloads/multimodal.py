"""A language model that reads images and speech: the results of two encoders join its input sequence."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.layers import Attention, Block, Trained, next_token_loss
from benchmarks.workloads.workload import Built, Workload

IMAGE, PATCH, MELS, FRAMES, TEXT, VOCABULARY = 336, 14, 128, 3000, 1024, 32000


class VisionEncoder(nn.Module):
    """Images `[batch, 3, 336, 336]` to 576 patches `[batch, 576, width]`, in the sizes of ViT-L/14."""

    def __init__(self, width: int = 1024, num_layers: int = 24, num_heads: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH, bias=False)
        self.positions = nn.Parameter(torch.zeros((IMAGE // PATCH) ** 2, width))
        self.layers = nn.ModuleList(Block(width, num_heads, 4 * width) for _ in range(num_layers))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return x


class AudioEncoder(nn.Module):
    """Spectrograms `[batch, 128, 3000]` to `[batch, 750, width]`, in the sizes of the encoder of Whisper large-v3.

    Neighbouring results are averaged, as in Qwen2-Audio.
    """

    def __init__(self, width: int = 1280, num_layers: int = 32, num_heads: int = 20) -> None:
        super().__init__()
        self.frames = nn.Conv1d(MELS, width, 3, padding=1)
        self.halve = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.zeros(FRAMES // 2, width))
        self.layers = nn.ModuleList(Block(width, num_heads, 4 * width) for _ in range(num_layers))
        self.pool = nn.AvgPool1d(2)

    def forward(self, audio: Tensor) -> Tensor:
        x = F.gelu(self.halve(F.gelu(self.frames(audio)))).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.pool(x.transpose(1, 2)).transpose(1, 2)


class GatedFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    """A layer of LLaMA: RMSNorm, rotary positions, SwiGLU."""

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, num_heads, causal=True)
        self.feed_forward = GatedFeedForward(width, hidden)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles=angles)
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    """Embedded sequences `[batch, length, width]` to logits, in the sizes of LLaMA 7B. All layers read the angles."""

    def __init__(self, width: int = 4096, num_layers: int = 32, num_heads: int = 32, hidden: int = 11008) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.layers = nn.ModuleList(DecoderLayer(width, num_heads, hidden) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor, num_tokens: int) -> Tensor:
        """Logits of the last `num_tokens` positions."""
        rates = 10000 ** (-torch.arange(0, self.head_width, 2, device=x.device) / self.head_width)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), rates)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x[:, -num_tokens:]))


def projector(width: int, target: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, target), nn.GELU(), nn.Linear(target, target))


class VisionAudioLanguage(Trained):
    """The language model reads the patches of an image, 30 seconds of speech, then text: 2350 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.vision_projector = VisionEncoder(), projector(1024, 4096)
        self.audio, self.audio_projector = AudioEncoder(), projector(1280, 4096)
        self.embedding = nn.Embedding(VOCABULARY, 4096)
        self.language = LanguageModel()

    def forward(self, image: Tensor, audio: Tensor, text: Tensor) -> Tensor:
        seen = self.vision_projector(self.vision(image))
        heard = self.audio_projector(self.audio(audio))
        sequence = torch.cat([seen, heard, self.embedding(text)], dim=1)
        return self.language(sequence, text.shape[1])

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        image, audio, text = batch
        return next_token_loss(self(image, audio, text[:, :-1]), text[:, 1:])


def build(batch_size: int) -> Built:
    image, audio = torch.empty(batch_size, 3, IMAGE, IMAGE), torch.empty(batch_size, MELS, FRAMES)
    return VisionAudioLanguage(), (image, audio, torch.empty(batch_size, TEXT + 1, dtype=torch.long))


def vision_audio_language(batch_size: int = 64) -> Workload:
    return Workload(
        name="vision_audio_language",
        build=partial(build, batch_size),
        batch_size=batch_size,
        source="sizes of ViT-L/14 at 336 pixels (arXiv 2010.11929), the encoder of Whisper large-v3 (arXiv 2212.04356) "
        "and LLaMA 7B (arXiv 2302.13971), joined as in LLaVA-1.5 (arXiv 2310.03744); no biases in the encoders' layers",
    )
