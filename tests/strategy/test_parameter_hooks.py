"""Hooks on gradients of parameters get what they get on one process: the gradient of a mini-batch, once (float64)."""

from __future__ import annotations

from typing import Any, Final

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_gpp.errors import ConfigError, GPPError
from tests.strategy import harness, parallel_models
from tests.strategy.harness import loader

STAGES: Final = {"first": 1, "second": 0}
REPLICAS: Final[dict[str, Any]] = {"stages": None, "num_pipelines": 2}
Outcome = tuple[list[float], dict[str, list[float]]]
"""The losses, and the parameters at the end that are here."""


class Hooked(pl.LightningModule):
    """Hooks of a kind on all parameters; they are not linear, so that parts of a gradient would show."""

    def __init__(self, kind: str, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.kind, self.losses, self.number = kind, list[float](), 0
        self.double()
        self.late = late
        if kind == "steps":
            self.steppers = {each: torch.optim.Adam([each], lr=0.05) for each in self.parameters()}
        if not late:
            self.register()

    def register(self) -> None:
        for parameter in self.parameters():
            if self.kind in ("changes", "draws"):
                parameter.register_hook(getattr(self, self.kind))
            elif self.kind in ("clamps", "steps"):
                parameter.register_post_accumulate_grad_hook(getattr(self, self.kind))

    def changes(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.02, 0.02) + gradient.square()

    def draws(self, gradient: Tensor) -> Tensor:
        return gradient + 0.1 * torch.randn_like(gradient)

    def clamps(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.02, 0.02)

    def steps(self, parameter: Tensor) -> None:
        self.steppers[parameter].step()
        self.steppers[parameter].zero_grad()

    def on_train_start(self) -> None:
        if self.late:
            self.register()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.second(self.first(batch[0]).tanh()), batch[2])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return None if self.kind == "steps" else torch.optim.Adam(self.parameters(), lr=0.02)


class ByHand(Hooked):
    """Two backwards for each step, whose gradients hooks get one by one; `direct`: autograd runs them by itself."""

    def __init__(self, kind: str, direct: bool = False) -> None:
        super().__init__(kind)
        self.automatic_optimization = False
        self.direct = direct

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for factor in (1.0, 2.0):
            loss = factor * super().training_step(batch, batch_idx)
            loss.backward() if self.direct else self.manual_backward(loss)
        optimizer.step()
        return loss


class Meta(Hooked):
    """Built without memory in stages; a hook sets the values, the same as on one process."""

    def __init__(self, kind: str) -> None:
        with torch.device("meta" if torch.distributed.is_initialized() else "cpu"):
            super().__init__(kind)

    def on_train_start(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.1).view(-1)[0] = 0.7


MODULES: Final = {"by_hand": ByHand, "meta": Meta}
CASES: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "changes": ("changes", {}, {"gradient_clip_val": 0.1}),
    "late": ("changes", {}, {}),
    "clamps": ("clamps", {}, {}),
    "steps": ("steps", {}, {}),
    "accumulated": ("changes", {}, {"accumulate_grad_batches": 2}),
    "clamps_accumulated": ("clamps", {}, {"accumulate_grad_batches": 2}),
    "replicas": ("changes", REPLICAS, {}),
    "steps_in_replicas": ("steps", REPLICAS, {}),
    "zero1": ("clamps", {**REPLICAS, "sharding": "zero1"}, {}),
    "whole": ("changes", {"step": "whole"}, {"accumulate_grad_batches": 2}),
    "by_hand": ("changes", {}, {}),
    "by_hand_clamps": ("clamps", {}, {}),
    "meta": ("changes", {}, {}),
}
"""The kind of hooks, options of the strategy, and of the trainer."""


def data(rank: int, pipelines: int) -> DataLoader[Any]:
    """The share of a pipeline in mini-batches of 8 samples."""
    samples = harness.make_data(24)
    sampler = DistributedSampler(samples, num_replicas=pipelines, rank=rank % pipelines, shuffle=False)
    return DataLoader(samples, batch_size=8 // pipelines, sampler=sampler if pipelines > 1 else None)


def trained(case: str, strategy: Any, devices: int, rank: int = 0, pipelines: int = 1) -> Outcome:
    kind, _, options = CASES.get(case, (case, {}, {}))
    known = next((made for name, made in MODULES.items() if case.startswith(name)), None)
    module = known(kind) if known is not None else Hooked(kind, late=case == "late")
    trainer = harness.trainer(strategy, devices, max_epochs=1, **options)
    trainer.fit(module, data(rank, pipelines))
    if case == "late":  # hooks stay with their parameters after a run
        trainer.fit_loop.max_epochs = 2
        module.late = False
        trainer.fit(module, data(rank, pipelines))
    return module.losses, {name: each.tolist() for name, each in module.named_parameters() if not each.is_meta}


def in_stages(rank: int, devices: int, cases: list[str]) -> list[Outcome]:
    found = []
    for case in cases:
        options = {"stages": STAGES if devices == 2 else None, "num_micro_batches": 2, **CASES[case][1]}
        found.append(trained(case, harness.strategy(**options), devices, rank, options.get("num_pipelines", 1)))
    return found


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize(
    ("devices", "cases"), [(1, ["changes", "steps", "accumulated", "by_hand"]), (2, list(CASES))], ids=["one", "two"]
)
def test_losses_and_weights_are_those_of_one_process(devices: int, cases: list[str]) -> None:
    results = harness.run(devices, in_stages, devices, cases)
    for case, (losses, _), *of_ranks in zip(cases, results[0], *reversed(results), strict=True):
        weights = {name: value for _, here in of_ranks for name, value in here.items()}
        expected_losses, expected_weights = trained(case, "auto", 1)
        if "num_pipelines" not in CASES[case][1]:  # whose losses are of their own samples
            assert losses == pytest.approx(expected_losses, rel=1e-12), case
        assert weights.keys() == expected_weights.keys(), case
        for name, value in expected_weights.items():
            assert torch.allclose(torch.tensor(weights[name]), torch.tensor(value), rtol=1e-11, atol=1e-12), case


def test_the_hooks_matter() -> None:
    assert trained("late", "auto", 1)[0] != pytest.approx(trained("nothing", "auto", 1)[0] * 2, rel=1e-3)


def drawn(rank: int) -> list[float]:
    strategy = harness.strategy(num_micro_batches=1, **REPLICAS)
    module = Hooked("draws")
    torch.manual_seed(rank)
    weights: list[float] = []

    class Noting(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            weights.extend(float(parameter.detach().sum()) for parameter in pl_module.parameters())

    harness.trainer(strategy, 2, max_epochs=1, callbacks=[Noting()]).fit(module, loader(16))
    return weights


def test_replicas_draw_the_same() -> None:
    first, second = harness.run(2, drawn)
    assert first
    assert first == second


REFUSED: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any], str]]] = {
    "fsdp": (
        "changes",
        {**REPLICAS, "sharding": "fsdp"},
        {},
        r"first.weight, first.bias, second.weight and 1 more have hooks on their gradients, of which "
        r"strategy.sharding=fsdp gives every rank only a part. Use strategy.sharding=zero1",
    ),
    "accumulated": (
        "changes",
        REPLICAS,
        {"accumulate_grad_batches": 2},
        r"hooks on their gradients, which get the gradient of each mini-batch.*trainer.accumulate_grad_batches=1",
    ),
    "asynchronous": (
        "clamps",
        {"weights": "stash"},
        {},
        r"by register_post_accumulate_grad_hook.*strategy.weights=stash.*Use register_hook",
    ),
}


def refused(rank: int) -> list[str]:
    found = []
    for kind, options, given, _ in REFUSED.values():
        strategy = harness.strategy(**{"stages": STAGES, "num_micro_batches": 2, **options})
        with pytest.raises(ConfigError) as caught:
            harness.trainer(strategy, 2, max_epochs=1, **given).fit(Hooked(kind), loader(16))
        found.append(str(caught.value))
    trainer = harness.trainer(harness.strategy(stages=STAGES, num_micro_batches=2), 2, max_epochs=1)
    with pytest.raises(GPPError) as error:
        trainer.fit(ByHand("changes", direct=True), loader(16))
    return [*found, str(error.value)]


def test_what_cannot_work_is_refused() -> None:
    direct = r"by loss.backward\(\), but parameters have hooks, which get their gradients at its end"
    for messages in harness.run(2, refused):
        for message, match in zip(messages, [*(row[-1] for row in REFUSED.values()), direct], strict=True):
            with pytest.raises(ConfigError, match=match):
                raise ConfigError(message)


def divided(rank: int) -> str:
    module = parallel_models.make()

    class Registering(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for parameter in pl_module.parameters():
                parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))

    strategy = harness.strategy(stages=None, num_micro_batches=2, tensor_parallel_size=2)
    trainer = harness.trainer(strategy, 2, max_epochs=1, callbacks=[Registering()])
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module, parallel_models.loader())
    return str(caught.value)


def test_parts_of_members_are_refused() -> None:
    for message in harness.run(2, divided):
        assert "have hooks on their gradients, of which strategy.tensor_parallel_size gives" in message
