"""Local losses: stages that start their own backwards train as plain torch does with detached edges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GPPStrategy
from lightning_gpp.capture import capture_step
from lightning_gpp.capture.local_losses import with_local_losses
from lightning_gpp.errors import ConfigError, SelfCheckError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import compile_program
from lightning_gpp.schedules.lowering import actions_of
from tests.stages.inprocess import chain_of
from tests.strategy import harness

BLOCKS, WIDTH, CLASSES = 4, 6, 3


class Head(nn.Module):
    """An auxiliary head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(hidden), labels)


class Local(pl.LightningModule):
    """Blocks with heads. `detached`: blocks without a gradient from the next. `factor`: of all losses but the last."""

    def __init__(self, detached: tuple[int, ...] = (0, 1, 2), factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        self.heads = nn.ModuleList(Head() for _ in range(BLOCKS))
        self.double()
        self.detached, self.factor = detached, factor
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def loss(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = first = self.heads[0](hidden := self.blocks[0](hidden), labels)
        for number in range(1, BLOCKS):
            loss = loss * self.factor if number == BLOCKS - 1 else loss
            hidden = self.blocks[number](hidden.detach() if number - 1 in self.detached else hidden)
            loss = loss + self.heads[number](hidden, labels)
        return loss, first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, first = self.loss(*batch)
        self.log("first", first)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        held = {name: p.grad for name, p in self.named_parameters() if not p.is_meta and p.grad is not None}
        self.gradients.append({name: gradient.clone() for name, gradient in held.items()})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(44, WIDTH, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (44,), generator=generator))


def plain(epochs: int = 1, **settings: Any) -> Local:
    """The same in plain torch: a loop over mini-batches of 16, 16 and 12 samples."""
    module = Local(**settings)
    optimizer = module.configure_optimizers()
    for batch in [*DataLoader(data(), batch_size=16)] * epochs:
        loss, _ = module.loss(*batch)
        optimizer.zero_grad()
        loss.backward()
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        module.losses.append(loss.item())
    return module


def captured(module: Local | None = None) -> Any:
    return capture_step(module or Local(), next(iter(DataLoader(data(), batch_size=16))))


def plan_of(*names: str, module: Local | None = None) -> Plan:
    subject = with_local_losses(captured(module), names)
    return chain_of(subject, [[f"blocks.{i}", f"heads.{i}"] for i in range(BLOCKS)], micro_batch_size=4)


def text_of(plan: Plan) -> list[str]:
    return [" ".join(map(str, actions_of(device))) for device in compile_program(plan).devices]


def test_nothing_is_sent_back_and_nobody_waits() -> None:
    plan = plan_of("heads")
    assert not any(message.gradient for message in compile_program(plan).messages)
    *_, second, first = text_of(plan)
    assert first == "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"
    assert second == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    assert text_of(replace(plan, schedule="zb_h1"))[-1].startswith("0F0 0I0 0W0 0F1")


def test_without_the_option_the_step_sends_the_gradients_of_losses_back() -> None:
    plan = chain_of(captured(), [[f"blocks.{i}", f"heads.{i}"] for i in range(BLOCKS)], micro_batch_size=4)
    back = {(plan.edges[message.edge].src, plan.edges[message.edge].dst) for message in compile_program(plan).messages}
    assert {(0, 3), (1, 3), (2, 3)} <= back
    assert [e.differentiable for e in plan.edges if (e.src, e.dst) == (0, 1)] == [False]  # the maker detaches


def test_stages_behind_an_edge_with_gradients_hold_what_comes_back() -> None:
    plan = plan_of("heads", module=Local(detached=(1,)))
    *_, second, first = text_of(plan)
    assert first.startswith("0F0 0F1 0B0")
    assert second.startswith("1F0 1B0")


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two stages": ({"stages": {"blocks.0": 0, "blocks.1": 0, "heads.0": 0, "heads.1": 0, "blocks": 1, "heads": 1}}, {}),
    "found": ({"max_replicas": 1}, {}),
    "some edges": ({"max_replicas": 1, "schedule": "zb_h1"}, {"detached": (1,)}),
    "recomputed": ({"max_replicas": 1, "recompute": ["blocks.0", "blocks.1"]}, {}),
}
ON_FOUR = {
    "four stages": ({"stages": [{"modules": [f"blocks.{i}", f"heads.{i}"]} for i in range(BLOCKS)]}, {}),
    "a step apart": (
        {
            "stages": [
                {"modules": ["blocks.0", "heads.0", "blocks.1", "heads.1"]},
                {"modules": ["blocks.2", "heads.2"]},
                {"modules": ["blocks.3", "heads.3"]},
                {"modules": ["@step"]},
            ]
        },
        {},
    ),
}
TWO = {
    "waiting": ({**RUNS["two stages"][0], "num_pipelines": 2, "local_losses": None}, {}),
    "local": ({**RUNS["two stages"][0], "num_pipelines": 2}, {}),
}


def fitted(rank: int, runs: dict[str, Any], devices: int) -> dict[str, Any]:
    found = {}
    for name, (settings, model) in runs.items():
        module = Local(**model)
        strategy = GPPStrategy(**{"local_losses": ["heads"], "micro_batch_size": 4, "timeout": 120.0, **settings})
        trainer = harness.trainer(strategy, devices=devices, max_epochs=1)
        trainer.fit(module, DataLoader(data(), batch_size=16))
        found[name] = module.losses, module.gradients
    return found


@pytest.mark.parametrize(("devices", "runs"), [(2, RUNS), pytest.param(4, ON_FOUR, marks=pytest.mark.acceptance)])
def test_losses_and_gradients_are_those_of_plain_torch(devices: int, runs: dict[str, Any]) -> None:
    ranks = harness.run(devices, fitted, runs, devices)
    for name, (_, model) in runs.items():
        expected = plain(**model)
        names = [check_equal(found[name], (expected.losses, expected.gradients)) for found in ranks]
        assert set().union(*names) == set(expected.gradients[0]), name


@pytest.mark.acceptance
def test_pipelines_average_their_gradients() -> None:
    for found in harness.run(4, fitted, TWO, 4):
        assert check_equal(found["local"], found["waiting"])


class Validated(Local):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(*batch)[0])


def resumed(rank: int, folder: str) -> dict[str, Any]:
    """An epoch with a validation, a checkpoint, and another epoch from it."""
    seen: tuple[list[float], list[dict[str, Tensor]]] = ([], [])
    for epochs, checkpoint in ((1, None), (2, f"{folder}/one.ckpt")):
        module = Validated()
        strategy = GPPStrategy(local_losses=["heads"], micro_batch_size=4, timeout=120.0, **RUNS["two stages"][0])
        trainer = harness.trainer(strategy, devices=2, max_epochs=epochs)
        loaders = DataLoader(data(), batch_size=16), DataLoader(data(), batch_size=16)
        trainer.fit(module, *loaders, ckpt_path=checkpoint)
        trainer.save_checkpoint(f"{folder}/one.ckpt")
        seen = seen[0] + module.losses, seen[1] + module.gradients
    return {"found": seen, "val": float(trainer.callback_metrics["val"])}


def test_a_resumed_run_goes_on_as_plain_torch(tmp_path: Path) -> None:
    expected = plain(epochs=2)
    with torch.no_grad():
        losses = [expected.loss(*batch)[0] * len(batch[0]) / 44 for batch in DataLoader(data(), batch_size=16)]
    for found in harness.run(2, resumed, str(tmp_path)):
        assert check_equal(found["found"], (expected.losses, expected.gradients))
        assert found["val"] == pytest.approx(float(sum(losses)), rel=1e-12)


def check_equal(one: Any, other: Any) -> set[str]:
    """Compare losses, and the gradients that the first has; the names of these."""
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    for ours, theirs in zip(one[1], other[1], strict=True):
        for name, gradient in ours.items():
            scale = max(theirs[name].abs().max().item(), 1e-3)
            assert (gradient - theirs[name]).abs().max() <= 1e-12 * scale, name
    return set(one[1][0])


def weighed(rank: int) -> str:
    strategy = GPPStrategy(local_losses=["heads"], micro_batch_size=4, **RUNS["two stages"][0])
    trainer = harness.trainer(strategy, devices=2, max_epochs=1)
    with pytest.raises(SelfCheckError) as caught:
        trainer.fit(Local(factor=0.5), DataLoader(data(), batch_size=16))
    return str(caught.value)


def test_the_self_check_finds_a_loss_that_the_step_weighs() -> None:
    assert all("the gradients of 12 parameters" in told for told in harness.run(2, weighed))


def test_modules_without_a_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"blocks.*no such module returns one trained number.*heads\.0, heads\.1"):
        with_local_losses(captured(), ["heads", "blocks"])


class Chained(Local):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, labels = batch
        loss = self.heads[0](self.blocks[0](hidden), labels)
        return loss + self.heads[1](self.blocks[1](hidden * loss), labels)


def test_a_loss_that_another_module_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a loss that mul reads \(.*test_local_losses"):
        with_local_losses(captured(Chained()), ["heads.0"])


@pytest.mark.parametrize("beside", [{"loss_reduction": "sum"}, {"slices": 2}])
def test_options_that_it_excludes(beside: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"local_losses"):
        GPPStrategy(local_losses=["heads"], **beside)
