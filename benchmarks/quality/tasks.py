"""The models that are trained: their parts, their data, and the pipelines that they are divided into."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpp_examples.two_tower import CAPTION_BYTES, CaptionedDigits

Part = tuple[Callable[[], nn.Module], tuple[str, ...]]
"""Makes the module of a part, and names of the inputs or parts that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Inputs by name, and targets; the first dimension of each is that of the samples."""

    inputs: Mapping[str, Tensor]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def chosen(self, which: Tensor) -> Samples:
        return Samples(
            inputs={name: tensor[which] for name, tensor in self.inputs.items()}, targets=self.targets[which]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model in parts, and its data.

    Args:
        parts: in topological order; the last one makes what the loss compares with the targets.
        layouts: for every number of stages the parts of each.
        shapes: of the output of each part, per sample.
        loss: from that output and the targets.
        load: gives the samples for training and those for validation.
        batch_size, num_steps: of a run.
        rates: learning rates of the sweep, by optimizer.
    """

    parts: Mapping[str, Part]
    layouts: Mapping[int, Sequence[Sequence[str]]]
    shapes: Mapping[str, tuple[int, ...]]
    loss: Callable[[Tensor, Tensor], Tensor]
    load: Callable[[], tuple[Samples, Samples]]
    batch_size: int
    num_steps: int
    rates: Mapping[str, Sequence[float]]

    def modules(self, seed: int) -> dict[str, nn.Module]:
        """The parts, with weights that depend on nothing but the seed."""
        torch.manual_seed(seed)
        return {name: make() for name, (make, _) in self.parts.items()}


# -- parts ------------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """A residual connection around normalised input; norms have no parameters."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.width = inner, (width,)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(F.layer_norm(x, self.width))


def perceptron(width: int) -> nn.Module:
    return Sum(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)), width)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.projection_in, self.projection_out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.projection_in(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection_out(mixed.transpose(1, 2).reshape(batch, length, width))


def attention(width: int, num_heads: int) -> nn.Module:
    return Sum(Attention(width, num_heads), width)


class Embedding(nn.Module):
    """Bytes and their positions."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, text: Tensor) -> Tensor:
        return self.bytes(text) + self.positions


class Bag(nn.Module):
    """From bytes, zero where padded, to the mean of their vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = Embedding(CAPTION_BYTES, width)

    def forward(self, captions: Tensor) -> Tensor:
        present = (captions != 0).unsqueeze(-1)
        return (self.embedding(captions) * present).sum(1) / present.sum(1)


class Join(nn.Module):
    """From the vectors of two towers to one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, width)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return F.gelu(self.linear(torch.cat([image * text, image - text], dim=1)))


def head(width: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))


# -- a chain: bytes of text -------------------------------------------------------------------------------------------

WIDTH, CONTEXT, BLOCKS = 32, 32, 5


def text_parts() -> dict[str, Part]:
    parts: dict[str, Part] = {"embedding": (lambda: Embedding(CONTEXT, WIDTH), ("text",))}
    for block in range(BLOCKS):
        parts[f"attention{block}"] = (lambda: attention(WIDTH, 2), (list(parts)[-1],))
        parts[f"perceptron{block}"] = (lambda: perceptron(WIDTH), (f"attention{block}",))
    parts["head"] = (lambda: head(WIDTH, 256), (list(parts)[-1],))
    return parts


def text_layouts() -> dict[int, list[list[str]]]:
    """12 stages: a part each. 8: one of most blocks. 2: the delay that double buffering has in any pipeline."""
    parts = list(text_parts())
    blocks = [parts[1 + 2 * block : 3 + 2 * block] for block in range(1, BLOCKS)]
    eight = [["embedding"], ["attention0"], ["perceptron0"], *blocks, ["head"]]
    return {1: [parts], 2: [parts[:6], parts[6:]], 8: eight, 12: [[part] for part in parts]}


def text_samples() -> tuple[Samples, Samples]:
    """Windows of the texts that come with CPython; every 20th is for validation."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    windows = torch.tensor(list(text)).unfold(0, CONTEXT + 1, CONTEXT).contiguous()
    held_out = torch.arange(len(windows)) % 20 == 0
    every = Samples(inputs={"text": windows[:, :-1].contiguous()}, targets=windows[:, 1:].contiguous())
    return every.chosen(~held_out), every.chosen(held_out)


TEXT = Task(
    parts=text_parts(),
    layouts=text_layouts(),
    shapes=dict.fromkeys(text_parts(), (CONTEXT, WIDTH)),
    loss=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    load=text_samples,
    batch_size=8,
    num_steps=600,
    rates={"adamw": (1e-3, 3e-3, 1e-2)},
)

# -- a graph: images and captions -------------------------------------------------------------------------------------

TOWER = 5
"""Parts of each tower."""


def tower_parts() -> dict[str, Part]:
    parts: dict[str, Part] = {}
    first = {"image": lambda: nn.Linear(64, WIDTH), "caption": lambda: Bag(WIDTH)}
    for name, make in first.items():
        parts[f"{name}0"] = (make, (name,))
        parts |= {f"{name}{i}": (lambda: perceptron(WIDTH), (f"{name}{i - 1}",)) for i in range(1, TOWER)}
    parts["join"] = (lambda: Join(WIDTH), (f"image{TOWER - 1}", f"caption{TOWER - 1}"))
    parts["head"] = (lambda: head(WIDTH, 1), ("join",))
    return parts


def tower_layouts() -> dict[int, list[list[str]]]:
    """12 stages: a part each. 8: two parts in most stages of the towers."""
    parts = list(tower_parts())
    pairs = [parts[s : s + n] for tower in (0, TOWER) for s, n in ((tower, 1), (tower + 1, 2), (tower + 3, 2))]
    eight = [*pairs, ["join"], ["head"]]
    return {1: [parts], 2: [parts[: 2 * TOWER], parts[2 * TOWER :]], 8: eight, 12: [[part] for part in parts]}


def tower_samples() -> tuple[Samples, Samples]:
    """The example's pairs of digits and captions."""
    data = CaptionedDigits()
    data.setup("fit")
    found = []
    for images, captions, matches in (data.training.tensors, data.validation.tensors):
        found.append(Samples(inputs={"image": images.flatten(1), "caption": captions}, targets=matches))
    return found[0], found[1]


TOWERS = Task(
    parts=tower_parts(),
    layouts=tower_layouts(),
    shapes=dict.fromkeys(tower_parts(), (WIDTH,)),
    loss=lambda logits, targets: F.binary_cross_entropy_with_logits(logits.squeeze(1), targets),
    load=tower_samples,
    batch_size=32,
    num_steps=500,
    rates={"adamw": (3e-4, 1e-3, 3e-3), "sgd": (3e-3, 1e-2, 3e-2)},
)

TASKS: Mapping[str, Task] = {"text": TEXT, "towers": TOWERS}
