"""Losses that average tokens: micro-batches count by them, so that training is that of one process."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp.errors import ConfigError
from lightning_gpp.stages.counts import Counted, candidates, reduction
from tests.strategy import harness

STAGES = {"words": 0, "head": 1}
TOKENS, SAMPLES = 11, 5


class Labelled(pl.LightningModule):
    """The loss of every step is the mean over labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(TOKENS, 6), nn.Linear(6, TOKENS)
        self.losses: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.words(batch["ids"])).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3)


class Shifted(Labelled):
    """Labels are those of the next token, as in language models of transformers."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.head(self.words(batch["ids"]))[:, :-1], batch["labels"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Hidden(Labelled):
    """The mean over what a mask of numbers does not hide."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(self.head(self.words(batch["ids"])).transpose(1, 2), batch["ids"], reduction="none")
        return (each * batch["mask"]).sum() / batch["mask"].sum()  # NaN, as its gradient, where all is hidden


def batches() -> list[dict[str, Tensor]]:
    """Mini-batches with other numbers of tokens in each sample; in the second one a micro-batch has none."""
    torch.manual_seed(1)
    found = []
    for lengths in ([2, 7, 5, 3, 1], [0, 0, 0, 4, 6], [7, 7, 1, 1, 2]):
        ids = torch.randint(TOKENS, (SAMPLES, 7))
        mask = torch.arange(7) < torch.tensor(lengths)[:, None]
        found.append({"ids": ids, "labels": ids.where(mask, -100), "mask": mask.long()})
    return found


class InItems(Labelled):
    """In one process: mini-batches count by their labels in an optimizer step, as `num_items_in_batch` lets them."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logged = self.loss({name: batch[name].flatten(0, 1) for name in ("ids", "labels")})
        self.log("loss", logged, on_step=True, on_epoch=True, batch_size=batch["ids"][..., 0].numel())
        logits = self.head(self.words(batch["ids"])).flatten(0, 2)
        total = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
        return total * self.trainer.accumulate_grad_batches / batch["items"]

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))


ACCUMULATED = 2


def over_pipelines(pipelines: int) -> list[dict[str, Tensor]]:
    """The mini-batches of several pipelines together, with the labels of their optimizer step."""
    found = []
    for of_step in even(pipelines * ACCUMULATED):
        items = sum((each["labels"] != -100).sum() for each in of_step)
        for place in range(0, len(of_step), pipelines):
            together = of_step[place : place + pipelines]
            joint = {name: torch.stack([each[name] for each in together]) for name in ("ids", "labels")}
            found.append({**joint, "items": items})
    return found


def even(number: int) -> list[list[dict[str, Tensor]]]:
    """The mini-batches of each optimizer step; one has no labels."""
    first, second, third = batches()
    empty = {**first, "labels": torch.full_like(first["labels"], -100)}
    rows = [first, second, empty, third, third, empty, second, first]
    return [rows[place : place + number] for place in range(0, len(rows), number)]


KINDS: list[tuple[type[Labelled], str]] = [
    (Labelled, "labels"),
    (Shifted, "labels:shifted"),
    (Hidden, "mask:except0"),
]
Report = tuple[list[float], dict[str, float], list[str]]
"""Losses, metrics and warnings."""


def fit(kind: type[Labelled], **options: Any) -> Report:
    module = kind().double()
    strategy: Any = harness.strategy(stages=STAGES, num_micro_batches=3, **options) if options else "auto"
    loader = DataLoader(batches(), batch_size=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = harness.trainer(strategy, 2 if options else 1, max_epochs=2, use_distributed_sampler=False)
        trainer.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.losses, metrics, [str(each.message) for each in caught]


def train(rank: int) -> list[tuple[Report, Report]]:
    return [(fit(kind, loss_reduction=told), fit(kind, loss_reduction="mean")) for kind, told in KINDS]


@pytest.fixture(scope="module")
def reports() -> list[tuple[Report, Report]]:
    """Of rank 0, with the reduction and without."""
    found: list[tuple[Report, Report]] = harness.run(2, train)[0]
    return found


def test_micro_batches_count_by_their_tokens(reports: list[tuple[Report, Report]]) -> None:
    for (kind, _), ((losses, metrics, told), _) in zip(KINDS, reports, strict=True):
        expected, known, _ = fit(kind)
        assert losses == pytest.approx(expected, rel=1e-12), kind
        assert metrics == pytest.approx(known, rel=1e-12), kind
        assert not [text for text in told if "undivided" in text or "no mean" in text], told


Trained = tuple[list[float], float, dict[str, Tensor]]
"""Losses of mini-batches, that of the epoch, and the parameters."""


def accumulated(module: Labelled, loader: Any, ranks: int, strategy: Any) -> Trained:
    trainer = harness.trainer(
        strategy,
        ranks,
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=0.5,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    data = DataLoader(loader, batch_size=None)
    trainer.fit(module, data, data)
    return module.losses, float(trainer.callback_metrics["loss_epoch"]), {**module.state_dict()}


def count_over_all(rank: int, pipelines: int, options: dict[str, Any]) -> Trained | None:
    ranks, pipeline = 2 * pipelines, rank // 2
    mine = [of_step[pipeline::pipelines] for of_step in even(pipelines * ACCUMULATED)]
    strategy = harness.strategy(
        stages=STAGES, num_micro_batches=3, num_pipelines=pipelines, loss_reduction="labels", **options
    )
    found = accumulated(Labelled().double(), sum(mine, []), ranks, strategy)
    return found if rank == 0 else None


@pytest.mark.parametrize(
    ("pipelines", "cases"),
    [
        (1, [{}, {"micro_batch_by": "mask:except0"}]),
        (2, [{}, {"sharding": "zero1"}, {"sharding": "fsdp"}]),
    ],
)
def test_mini_batches_of_an_optimizer_step_count_by_their_tokens(pipelines: int, cases: list[dict[str, Any]]) -> None:
    losses, epoch, trained = accumulated(InItems().double(), over_pipelines(pipelines), 1, "auto")
    given = [(pipelines, options) for options in cases]
    for found, *_ in harness.run_each(2 * pipelines, count_over_all, given):
        assert found[0] == pytest.approx(losses, rel=1e-12, nan_ok=True)
        assert found[1] == pytest.approx(epoch, rel=1e-12, nan_ok=True)
        torch.testing.assert_close(found[2], trained, rtol=1e-12, atol=1e-14)


def told_alone(rank: int, options: dict[str, Any]) -> str:
    """The error, or the warnings, of an accumulation in one process."""
    strategy = harness.strategy(stages={"words": 0, "head": 0}, num_micro_batches=2, loss_reduction="labels", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            accumulated(Labelled(), batches(), 1, strategy)
        except ConfigError as error:
            return str(error)
    return " ".join(str(each.message) for each in caught)


def test_what_cannot_count_by_tokens_is_told() -> None:
    whole, ahead = harness.run_each(1, told_alone, [({"step": "whole"},), ({"weights": "stash"},)])
    assert re.search("loss_reduction.*labels.* does not weigh the mini-batches of steps that run as a whole", whole[0])
    assert re.search("loss_reduction.*labels.* weighs .*set strategy.weights=synchronous", ahead[0])


def test_the_self_check_names_what_the_loss_averages(reports: list[tuple[Report, Report]]) -> None:
    names = [name.replace("mask:except0", "labels") for _, name in KINDS]  # labels hide the same as the mask does
    for name, (_, (_, _, told)) in zip(names, reports, strict=True):
        assert re.findall(r"set strategy\.loss_reduction=(\S+)\. ", " ".join(told)) == [name]


def test_masks_are_tried_after_labels_and_other_numbers_are_none() -> None:
    labels, masks = ([str(each) for each in kind] for kind in candidates(batches()[0], SAMPLES, {}))
    assert (labels, masks) == (["labels", "labels:shifted"], ["mask:except0", "mask:shifted:except0"])


def test_an_entry_that_is_not_there_is_told() -> None:
    told = str(Counted("label").missing(batches()[0], SAMPLES, {}))
    for part in ("strategy.loss_reduction names 'label'", "Did you mean labels?", "ids, labels, mask"):
        assert part in told


@pytest.mark.parametrize("text", ["labels", "labels:shifted", "mask:except0", "inputs.labels:shifted:except7"])
def test_parts_are_written_as_they_are_read(text: str) -> None:
    assert str(Counted.parsed(text)) == text


@pytest.mark.parametrize("text", ["", "labels:", "mask:0", "labels:shifted:exceptx"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.loss_reduction is .* 'labels:shifted'"):
        reduction(text)
