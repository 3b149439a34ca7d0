"""Checks of steps as a whole run on the user's mini-batch, and messages name what was tried on the user's model."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp.errors import CaptureError, ForeignTensorError
from tests.strategy import harness

STAGES = {"first": 1, "second": 0}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)

    def batch(self) -> Any:
        return numbers(4, 4)

    def batches(self) -> list[Any]:
        return [self.batch()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.second(self.first(batch).tanh()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


class Prompt(Plain):
    """A frozen network with a trained input."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.prompt = nn.Parameter(torch.ones(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.second(self.first(batch * self.prompt).tanh()).square().mean()


class Scale(Prompt):
    """A frozen network with a trained parameter behind."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.second(self.first(batch).tanh()) * self.prompt[:1]).square().mean()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 1)

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(ids).masked_scatter((ids == 1)[..., None], rows))
        return result


class Rows(Plain):
    """Several rows of one tensor per sample; the values tell which are whose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tokens(), nn.Identity()  # type: ignore[assignment]

    def batch(self) -> Any:
        return {"ids": torch.tensor([[1, 2], [1, 1]]), "rows": numbers(3, 4)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.first(batch["ids"], batch["rows"]).square().mean()


KINDS = {kind.__name__: kind for kind in (Plain, Prompt, Scale, Rows)}


def fit(strategy: Any, devices: int, kind: str) -> dict[str, Any]:
    module = KINDS[kind]().double()
    trainer = harness.trainer(strategy, devices, max_epochs=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(module.batches(), batch_size=None))
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items() if not value.is_meta},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "warned": [str(each.message) for each in caught if "strategy." in str(each.message)],
    }


def divided(rank: int, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    stages = {"first.embedding": 1, "first.head": 0} if issubclass(KINDS[kind], Rows) else STAGES
    return fit(harness.strategy(**{"stages": stages, "num_micro_batches": 2, **settings}), 2, kind)


class MoreRows(Rows):
    """One row for each sample of the first mini-batch, and more of the second."""

    def batches(self) -> list[Any]:
        later = {"ids": torch.tensor([[1, 1], [1, 2]]), "rows": numbers(3, 4)}
        return [{"ids": torch.tensor([[1, 2], [2, 1]]), "rows": numbers(2, 4)}, later]


class Weighted(Plain):
    """Every micro-batch needs all weights, which are once as many as samples."""

    def batches(self) -> list[Any]:
        return [{"x": numbers(count, 4), "weights": torch.ones(3, dtype=torch.float64)} for count in (4, 3)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["x"], batch_idx) * batch["weights"].sum()


class Poisoned(Plain):
    """A hook that drops gradients if one is not finite, as forums pass it on."""

    drops = True

    def batch(self) -> Any:
        return numbers(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("nan") if self.global_step == 1 else 1.0)

    def on_after_backward(self) -> None:
        if self.drops and any(each.grad.isnan().any() for each in self.parameters() if each.grad is not None):
            self.zero_grad()


class Dropped(Poisoned):
    drops = False


KINDS.update(MoreRows=MoreRows, Weighted=Weighted, Poisoned=Poisoned, Dropped=Dropped)
WHOLE = {"step": "whole"}
CHECKS: list[tuple[str, dict[str, Any]]] = [
    *(("Prompt", {}), ("Scale", {}), ("Scale", WHOLE)),  # parameters outside of a frozen network are trained
    *(("Rows", {}), ("Rows", WHOLE)),  # train undivided, which is told
    *(("Rows", {"num_micro_batches": 1}), ("Rows", {**WHOLE, "num_micro_batches": 1})),
    *(("MoreRows", WHOLE), ("Weighted", {"batch_dims": {"weights": None}})),  # the lines that refusals name
    ("Dropped", {"on_nonfinite": "skip"}),
]
ALONE = {"Dropped": "Poisoned"}
"""The module that does by a hook what an option does."""


def check(kind: str, settings: dict[str, Any], found: dict[str, Any] | None = None) -> list[str]:
    """The warnings of a run that trains as one process does."""
    found = found or harness.run(2, divided, kind, settings)[0]
    expected = fit("auto", 1, ALONE.get(kind, kind))
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
    for name, value in found["state"].items():
        torch.testing.assert_close(value, expected["state"][name], rtol=1e-12, atol=1e-13)
    return list(found["warned"])


def test_training_is_that_of_one_process_and_undivided_rows_are_told() -> None:
    reports = harness.run_each(2, divided, CHECKS)
    told = [check(*case, report) for case, (report, _) in zip(CHECKS, reports, strict=True)]
    rows = [any("undivided mini-batches" in text for text in texts) for texts in told[3:7]]
    assert rows == [True, True, False, False]
    assert not any(told[number] for number in (5, 6, 8))


def refused(rank: int, kind: str, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        divided(rank, kind, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "error", "line"),
    [
        ("MoreRows", CaptureError, "strategy.step=whole"),
        ("Weighted", CaptureError, "strategy.batch_dims={weights: null}"),
        ("Poisoned", ForeignTensorError, "strategy.on_nonfinite=skip"),
    ],
)
def test_refusals_name_lines_that_work(kind: str, error: type[Exception], line: str) -> None:
    assert all(line in text for text in harness.run(2, refused, kind, error))


class Routed(pl.LightningModule):
    """Mixtral with the loss of its routers, which transformers computes over the tokens of all samples."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
        kinds = {"output_router_logits": True, "attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **kinds))

    def batches(self) -> list[Any]:
        return [torch.randint(0, 30, (4, 9), generator=torch.Generator().manual_seed(3))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


KINDS["Routed"] = Routed  # type: ignore[assignment]


@pytest.mark.acceptance
def test_a_step_as_a_whole_is_named_for_a_loss_over_all_tokens_and_works() -> None:
    free = {"stages": None, "num_pipelines": 1}
    (found, _) = harness.run(2, divided, "Routed", free)
    (text,) = found["warned"]
    assert "strategy.step=whole" in text
    check("Routed", {**free, "step": "whole"})
