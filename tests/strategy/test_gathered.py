"""The door to the tensors of other ranks in hooks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import ConfigError, ForeignTensorError, summon_full_params
from tests.strategy import harness

STAGES = [{"modules": ["body"], "devices": [1]}, {"modules": ["head", "@step"], "devices": [0]}]
ONE = torch.ones(2, 4, dtype=torch.float64)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("levels", torch.linspace(0.1, 1.0, 4))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Merges(Plain):
    """Changes weights by those of another rank, on all ranks, in a hook of every step."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        with summon_full_params(self), summon_full_params(self.head):
            self.body.weight += 0.1 * self.head.weight.T
            self.head.bias.data = self.head.bias.data + self.body.weight.mean()
            self.seen.append(float(self.body.weight.sum()))


class Saves(Plain):
    """Saves a checkpoint inside, whose hook opens the door again."""

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        with summon_full_params(self), tempfile.TemporaryDirectory() as folder:
            self.trainer.save_checkpoint(f"{folder}/saved.ckpt")
            self.seen.append(float(self(ONE).sum()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with summon_full_params(self.head):
            self.seen.append(float(self.head.weight.detach().norm()))


class Forgets(Plain):
    """Tries what is refused."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.body.weight.is_meta and self.global_step:  # after the self-check, whose copy has no door
            refused = r"was called in a step, which one rank runs, for body.bias, body.weight, which others hold"
            with pytest.raises(ConfigError, match=refused), summon_full_params(self.body):
                pass
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        refused = r"needs values of .*'(body|head).weight'.*with lightning_gpp.summon_full_params\(module\):"
        with pytest.raises(ForeignTensorError, match=refused):
            self(ONE)
        with (
            pytest.raises(ConfigError, match=r"'body.weight' changed on some ranks.*all ranks make the same change"),
            summon_full_params(self),
        ):
            self.body.weight.data.mul_(1 + 1e-9 * (1 - self.trainer.global_rank))
        with summon_full_params(self):
            own = self.body if self.trainer.global_rank else self.head
            other = self.head if self.trainer.global_rank else self.body
            assert isinstance(own.weight.grad, Tensor)
            with pytest.raises(ForeignTensorError, match="`item`"):
                other.weight.grad.sum().item()  # type: ignore[union-attr]
        assert other.weight.is_meta
        self.seen.append(1)


class Generates(Plain):
    """Validates by a loop that ends when the data say so, and reads a weight."""

    def val_dataloader(self) -> DataLoader[Any]:
        return loader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, count = batch[0], 0
        while x.norm() > 0.1 and count < 5:
            count += 1
            x = 0.5 * self(x) * self.body.weight.abs().mean()
        self.seen.append(float(x.sum()))
        self.log("generated", x.sum())


def loader() -> DataLoader[Any]:
    return DataLoader(harness.make_data(8), batch_size=4)


def trainer(gpp: bool, **options: Any) -> pl.Trainer:
    given = harness.strategy(stages=STAGES, num_micro_batches=2, **options) if gpp else "auto"
    return harness.trainer(given, 2 if gpp else 1)


def fit(rank: int, gpp: bool, kinds: Sequence[type[Plain]]) -> list[Any]:
    found = []
    for kind in kinds:
        module, made = kind().double(), trainer(gpp)
        made.fit(module, loader())
        found.append((module.seen, {name: float(value) for name, value in made.callback_metrics.items()}))
    return found


def test_hooks_compute_with_the_tensors_of_all_ranks_as_one_process_does() -> None:
    kinds = [Merges, Saves, Generates]
    found, others = harness.run(2, fit, True, [*kinds, Forgets])
    expected = fit(0, False, kinds)
    assert all(len(seen) >= 4 for seen, _ in expected)
    assert found.pop()[0] == others.pop()[0] == [1, 1]
    for (seen, metrics), (here, logged) in zip(found, expected, strict=True):
        assert seen == pytest.approx(here, rel=1e-12)
        assert metrics == pytest.approx(logged, rel=1e-12)
    for place in (0, 2):
        assert others[place][0] == pytest.approx(expected[place][0], rel=1e-12)


class Writes(pl.LightningModule):
    """A language model whose validation takes the loss, and then writes; its calls hand on a cache."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 20, "n_positions": 16}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.model(input_ids=batch, labels=batch).loss)
        written = self.model.generate(input_ids=batch[:, :3], max_new_tokens=5, do_sample=False)
        self.seen.append(int(written.sum()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def written(rank: int, gpp: bool) -> tuple[list[int], float]:
    texts = torch.randint(1, 20, (8, 9), generator=torch.Generator().manual_seed(0))
    module = Writes()
    strategy: Any = harness.strategy(stages=None, num_pipelines=1, num_micro_batches=2, search_seconds=1.0)
    made = harness.trainer(strategy if gpp else "auto", 2 if gpp else 1, max_epochs=1, num_sanity_val_steps=0)
    made.fit(module, DataLoader(texts, 4), DataLoader(texts, 4))  # type: ignore[arg-type]
    return module.seen, float(made.callback_metrics["val"])


@pytest.mark.acceptance
def test_a_language_model_writes_in_validation() -> None:
    pytest.importorskip("transformers")
    expected, loss = written(0, False)
    for seen, found in harness.run(2, written, True):
        assert seen == expected
        assert found == pytest.approx(loss, rel=1e-5)
