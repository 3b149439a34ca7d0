"""Micro-batches with sizes of their own: rows go with their samples, packed documents stay whole, samples of different
lengths make micro-batches of equal work, and functions of users divide. Training equals that of one process.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategy import harness

WORDS, IMAGE, WIDTH = 11, 1, 6


class Language(pl.LightningModule):
    """Attention over words; the loss is a mean over labels that are not ignored."""

    rate = 0.3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mixer, self.head = nn.Embedding(WORDS, WIDTH), Mixer(), nn.Linear(WIDTH, WORDS)
        self.losses: list[float] = []

    def logits(self, batch: Any) -> Tensor:
        mask = batch["mask"].bool()
        logits: Tensor = self.head(self.mixer(self.words(batch["ids"]), mask[:, None] & mask[:, :, None]))
        return logits

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)

    @staticmethod
    def batch(lengths: list[int]) -> dict[str, Tensor]:
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids = torch.randint(2, WORDS, mask.shape) * mask
        return {"ids": ids, "mask": mask.long(), "labels": ids.where(mask, -100)}


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, seen: Tensor) -> Tensor:
        scores = (self.query(words) @ words.transpose(1, 2)).masked_fill(~seen, -1e9)
        return words + scores.softmax(-1) @ words


class Pictures(Language):
    """Several images to each sample, in the rows of one tensor, take the places of words."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = nn.Linear(4, WIDTH)

    def logits(self, batch: Any) -> Tensor:
        mask, ids = batch["mask"].bool(), batch["ids"]
        words = self.words(ids).masked_scatter((ids == IMAGE)[..., None], self.eyes(batch["pixels"]))
        logits: Tensor = self.head(self.mixer(words, mask[:, None] & mask[:, :, None]))
        return logits

    @staticmethod
    def batch(lengths: list[int]) -> dict[str, Tensor]:
        batch = Language.batch(lengths)
        for ids, labels, length in zip(batch["ids"], batch["labels"], lengths, strict=True):
            ids[: length // 2], labels[: length // 2] = IMAGE, -100
        count = sum(length // 2 for length in lengths)
        return {**batch, "pixels": torch.randn(count, 4, dtype=torch.float64)}


class Boxes(Language):
    """Boxes in pictures: of some micro-batches there is one, which is less than the pictures that it is chosen from."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes, self.corners = nn.Linear(3, WIDTH), nn.Linear(4, WIDTH)
        del self.words, self.mixer

    def loss(self, batch: Any) -> Tensor:
        seen = self.eyes(batch["pictures"])[batch["owner"]]
        return F.cross_entropy(self.head(torch.tanh(seen * self.corners(batch["boxes"]))), batch["kinds"])

    @staticmethod
    def batch(lengths: list[int]) -> dict[str, Tensor]:
        counts = torch.tensor([length // 3 for length in lengths])
        numbers = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
        owner = torch.arange(len(counts)).repeat_interleave(counts)
        boxes = {"boxes": numbers(len(owner), 4), "kinds": torch.randint(WORDS, owner.shape), "owner": owner}
        return {"pictures": numbers(len(counts), 3), **boxes}


class Packed(Language):
    """Documents in one row, which do not see each other."""

    def logits(self, batch: Any) -> Tensor:
        document = (batch["position_ids"] == 0).cumsum(-1)
        seen = document[:, None] == document[:, :, None]
        logits: Tensor = self.head(self.mixer(self.words(batch["ids"]), seen))
        return logits

    @staticmethod
    def batch(lengths: list[int]) -> dict[str, Tensor]:
        ids = torch.randint(2, WORDS, (1, sum(lengths)))
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return {"ids": ids, "labels": ids.clone(), "position_ids": places, "cu_seqlens": ends}


class Graphs(Language):
    """A network of graphs, whose nodes are rows; the loss is a mean over graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        del self.words, self.mixer, self.head

    def loss(self, batch: Any) -> Tensor:
        nodes = self.into(batch["x"])
        source, target = batch["edges"]
        nodes = self.out((nodes + torch.zeros_like(nodes).index_add(0, target, nodes[source])).tanh())
        of_graphs = torch.zeros(len(batch["y"]), dtype=nodes.dtype).index_add(0, batch["graph"], nodes[:, 0])
        return F.mse_loss(of_graphs, batch["y"])

    @staticmethod
    def batch(lengths: list[int]) -> dict[str, Tensor]:
        numbers = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
        graph = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
        edges = torch.stack([torch.arange(len(graph) - 1), torch.arange(1, len(graph))])
        edges = edges[:, graph[:-1] == graph[1:]]
        return {"y": numbers(len(lengths)), "x": numbers(len(graph), 3), "edges": edges, "graph": graph}


def graphs(batch: dict[str, Tensor], number: int) -> list[dict[str, Tensor]]:
    parts = []
    for chosen in torch.arange(len(batch["y"])).tensor_split(number):
        nodes = (batch["graph"] >= chosen[0]) & (batch["graph"] <= chosen[-1])
        first = int(nodes.nonzero()[0])
        edges = batch["edges"][:, nodes[batch["edges"][0]]] - first
        graph = batch["graph"][nodes] - chosen[0]
        parts.append({"y": batch["y"][chosen], "x": batch["x"][nodes], "edges": edges, "graph": graph})
    return parts


LENGTHS = [[3, 1, 7, 2], [2, 6, 1, 4], [5, 5, 1, 3], [1, 4, 6, 2], [8, 2, 3, 1], [4, 2, 1, 7], [2, 3, 4], [6, 6, 2, 5]]
KINDS: dict[str, tuple[type[Language], dict[str, Any]]] = {
    "rows": (Pictures, {"batch_rows": {"pixels": "ids:only1"}, "loss_reduction": "labels"}),
    "boxes": (Boxes, {"batch_rows": {"boxes": "owner", "kinds": "owner"}, "loss_reduction": "kinds"}),
    "work": (Language, {"micro_batch_by": "mask:except0", "loss_reduction": "labels"}),
    "documents": (Packed, {"micro_batch_by": "documents", "loss_reduction": "labels", "num_micro_batches": 4}),
    "function": (Graphs, {"micro_batch_by": graphs}),
}
STAGES: dict[type[Language], dict[str, int]] = {Graphs: {"into": 0, "out": 1}}
STAGES |= {kind: {"words": 0, "mixer": 0, "head": 1} for kind in (Language, Packed)}
STAGES[Boxes] = {"eyes": 0, "corners": 0, "head": 1}
STAGES[Pictures] = {"eyes": 0, "words": 0, "mixer": 1, "head": 1}
Report = tuple[list[float], dict[str, float], dict[str, Tensor], list[str]]
"""Losses, metrics, weights and warnings."""


def fit(name: str, world: int = 1, **options: Any) -> Report:
    kind, division = KINDS[name]
    module = kind().double()
    torch.manual_seed(1)
    loader = DataLoader([kind.batch(lengths) for lengths in LENGTHS], batch_size=None)
    given = {"stages": STAGES[kind], "num_micro_batches": 2, **division, **options}
    strategy: Any = harness.strategy(**given) if world > 1 else "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = harness.trainer(strategy, world, max_epochs=2, use_distributed_sampler=False)
        trainer.fit(module, loader, loader)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    with getattr(trainer.strategy, "whole", lambda: warnings.catch_warnings())():
        weights = {key: value.clone() for key, value in module.state_dict().items()} if world == 1 else {}
    return module.losses, metrics, weights, [str(each.message) for each in caught]


def train(rank: int) -> dict[str, Report]:
    found = {name: fit(name, 2) for name in KINDS}
    return found | {"recomputed": fit("rows", 2, recompute=True, num_micro_batches=4, schedule="zb_h1")}


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    found: dict[str, Report] = harness.run(2, train)[0]
    return found


@pytest.mark.parametrize("name", [*KINDS, "recomputed"])
def test_training_is_that_of_one_process(reports: dict[str, Report], name: str) -> None:
    losses, metrics, _, told = reports[name]
    expected, known, _, _ = fit("rows" if name == "recomputed" else name)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert metrics == pytest.approx(known, rel=1e-12)
    assert not [text for text in told if "undivided" in text or "whole" in text], told


def validated(rank: int, world: int) -> float:
    """The loss of validation alone, for which nobody says whose rows are whose."""
    module = Pictures().double()
    torch.manual_seed(1)
    loader = DataLoader([Pictures.batch(LENGTHS[0])], batch_size=None)
    strategy: Any = harness.strategy(stages=STAGES[Pictures], num_micro_batches=2) if world > 1 else "auto"
    trainer = harness.trainer(strategy, world, use_distributed_sampler=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning guesses the number of samples
        return trainer.validate(module, loader, verbose=False)[0]["val"]


def test_evaluation_does_not_cut_rows_that_may_belong_to_samples() -> None:
    assert harness.run(2, validated, 2)[0] == pytest.approx(validated(0, 1), rel=1e-12)
