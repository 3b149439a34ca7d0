"""Recurrent networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.acceptance.models.base import B, Entry, classifier, ids, numbers


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.rnn = kind(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0].mean(1))


class Packed(nn.Module):
    """Sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(32, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(out.sum(1))

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["x"], batch["lengths"]), batch["y"])


class PackedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.packed, self.last = nn.Linear(3, 4), Packed(), nn.Linear(3, 3)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        h = self.packed(batch["x"], batch["lengths"])
        return F.cross_entropy(self.last(h + self.first(h).sum(1, keepdim=True)), batch["y"])


class Translator(nn.Module):
    """A decoder that takes its own results, cell by cell, with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.encoder, self.cell = nn.GRU(8, 8, batch_first=True), nn.GRUCell(16, 8)
        self.head = nn.Linear(8, 32)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(*batch).transpose(1, 2), batch[1])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, last = self.encoder(self.embed(x))
        h, out = last[0], []
        for token in self.embed(y).unbind(1):
            weights = (memory @ h[:, :, None]).softmax(1)
            h = self.cell(torch.cat([token, (weights * memory).sum(1)], dim=1), h)
            out.append(self.head(h))
        return torch.stack(out, dim=1)


class TimeMajor(nn.Module):
    """(time, samples): the first dimension does not count samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(32, 8), nn.LSTM(8, 8), nn.Linear(8, 32)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.head(self.rnn(self.embed(batch["x"]))[0])
        return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


_SENTENCES = {"x": ids(), "lengths": torch.tensor([8, 3, 5, 7]), "y": torch.arange(B) % 3}
_TIME_MAJOR = {"x": ids().T.contiguous(), "y": ids(seed=1).T.contiguous()}

MODELS: dict[str, Entry] = {
    "lstm": lambda: classifier(Tagger(nn.LSTM), ids()),
    "gru": lambda: classifier(Tagger(nn.GRU), ids()),
    "packed_lstm": lambda: (Packed(), _SENTENCES),
    "packed_inside": lambda: (PackedInside(), _SENTENCES),
    "translator": lambda: (Translator(), (ids(), ids(5, seed=1))),
    "time_major": lambda: (TimeMajor(), _TIME_MAJOR),
    "time_major_told": lambda: (TimeMajor(), _TIME_MAJOR, {"batch_dims": {"x": 1, "y": 1}}),
    "temporal_convolutions": lambda: classifier(
        nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3, dilation=2), nn.Flatten(), nn.Linear(48, 3)),
        numbers(4, 12),
    ),
}
