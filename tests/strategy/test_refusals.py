"""What cannot work is refused before training starts, with what, where, the values and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import Fabric, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_gpp import ConfigError, GPPError, GPPFabricStrategy, GPPStrategy, PlanError
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.strategy.checks import check_callbacks
from lightning_gpp.strategy.data import Placeholder
from lightning_gpp.training.updates.gradients import check_scaled
from tests.strategies import chain
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_micro_batches": 4, "micro_batch_size": 2}, "num_micro_batches=4 and strategy.micro_batch_size=2"),
        (
            {"loss_reduction": "labels[1:]"},
            r"loss_reduction is 'labels\[1:\]'; it must be 'mean', 'sum', or the tensor",
        ),
        ({"schedule": "zbv", "max_replicas": 2}, r"'zbv' puts every stage on one device.*num_pipelines"),
        (
            {"schedule": "chimera", "stages": [{"modules": ["a"], "devices": [0]}, {"modules": ["b"], "devices": [1]}]},
            r"'chimera' gives every stage a second device.*leave `devices` out",
        ),
        (
            {"stages_per_device": 2, "stages": [{"modules": ["a"], "devices": [0]}, {"modules": ["b"]}]},
            "strategy.stages_per_device=2 cannot move .* `devices`: these already have devices. Leave it out",
        ),
        (
            {"stages_per_device": 2, "plan": chain([1, 1], 4)},
            "per_device=2 cannot move the stages of strategy.plan",
        ),
    ],
)
def test_settings(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        GPPStrategy(**settings)


def one_stage(**changes: Any) -> Plan:
    stage = Stage(name="all", modules=("left", "right", "head", STEP), devices=(0,), micro_batch_size=2)
    return Plan(stages=(stage,), edges=(), batch_size=8, **changes)


@pytest.mark.parametrize("script", ["-c", "", "gone.py"])
def test_processes_without_a_script(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [script])
    with pytest.raises(ConfigError, match="starts 1 more processes.*Save the code in a file"):
        Fabric(strategy=GPPFabricStrategy(), accelerator="cpu", devices=2)
    with pytest.raises(ConfigError, match="starts 1 more processes.*Save the code in a file"):
        Trainer(strategy=GPPStrategy(), accelerator="cpu", devices=2, logger=False)
    assert Trainer(strategy=GPPStrategy(), accelerator="cpu", devices=1, logger=False).strategy.launcher is None


def test_a_plan_and_stages() -> None:
    with pytest.raises(ConfigError, match=r"Both strategy.plan and strategy.stages"):
        GPPStrategy(plan=one_stage(), stages={"left": 0})


def test_a_plan_file_that_is_missing() -> None:
    with pytest.raises(PlanError, match="nowhere.yaml"):
        GPPStrategy(plan="nowhere.yaml")


class Manual(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(TwoTowers):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class Fetching(TwoTowers):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return next(dataloader_iter)


class Quasi(TwoTowers):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Unpredictable(TwoTowers):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("the optimizer is refused before the step is captured")


class Foreign(TwoTowers):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.zeros(2))])


class Early(TwoTowers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class Misspelt(TwoTowers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"Loss": self.loss(batch)[0]}


class Scalarless(TwoTowers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        self.log("logits", logits)
        return loss


class Labelled(TwoTowers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((*batch[:2], batch[2] + 3), batch_idx)


class Repeating(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Sharpness(TwoTowers):
    def configure_optimizers(self) -> Any:
        return Repeating(self.parameters(), lr=0.1)


class Longer(TwoTowers):
    """A hook appends a layer, which no optimizer has."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.left.append(torch.nn.Linear(6, 6, dtype=torch.float64))


class Later(TwoTowers):
    """A hook makes a layer, and gives it to the optimizer."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.late = torch.nn.Linear(6, 6, dtype=torch.float64)
            self.optimizers().optimizer.add_param_group({"params": list(self.late.parameters())})


class Replaced(TwoTowers):
    """A hook puts another layer in place of one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.head = torch.nn.Linear(12, 3, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.left(batch[0])
        loss = torch.nn.functional.cross_entropy(self.head(torch.cat([hidden, hidden], 1)), batch[2])
        return {"loss": loss, "logits": hidden.detach()}


class Bias(torch.nn.Module):
    """Has no way to give its parameter values."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(6))


class Hopeless(TwoTowers):
    def configure_model(self) -> None:
        with torch.device("meta"):
            self.left.append(Bias())


Case = tuple[type[TwoTowers], dict[str, Any], dict[str, Any], str]

CASES: dict[str, Case] = {
    "more micro-batches than samples": (
        TwoTowers,
        {"num_micro_batches": 9},
        {},
        "num_micro_batches=9, but .* 8 samples",
    ),
    "unknown module": (TwoTowers, {"stages": {"left": 0, "rihgt": 0, "head": 0}}, {}, "'rihgt'.*Did you mean 'right'"),
    "fewer devices than the plan": (TwoTowers, {"stages": {"left": 0, "right": 1, "head": 1}}, {}, "needs 2 devices"),
    "plan of another model": (TwoTowers, {"plan": one_stage(model="0123")}, {}, "made for another model"),
    "manual optimization": (
        Manual,
        {"step": "micro_batches"},
        {},
        "Manual uses manual optimization.*strategy.step=whole",
    ),
    "own backward": (
        OwnBackward,
        {"step": "micro_batches"},
        {},
        "OwnBackward overrides `backward`.*strategy.step=whole",
    ),
    "schedule of a step as a whole": (Manual, {"schedule": "1f1b"}, {}, "schedule='1f1b' does not go together.*Leave"),
    "weights of a step as a whole": (TwoTowers, {"step": "whole", "weights": "stash"}, {}, "weights='stash' does not"),
    "check of a step that optimizes": (Manual, {"step": "whole", "on_nonfinite": "stop"}, {}, "check in your code"),
    "dataloader_iter": (Fetching, {}, {}, "Fetching.training_step takes.*Let the step take `batch`"),
    "L-BFGS": (Quasi, {"step": "micro_batches"}, {}, "returned L-BFGS.*first-order"),
    "repeated closure": (Sharpness, {}, {}, "called its closure more than once"),
    "foreign parameter": (Foreign, {}, {}, r"a parameter of shape \(2,\) that is not one of the module's"),
    "no rule of prediction": (Unpredictable, {"weights": "predicted"}, {}, "cannot predict Adagrad .*weights=stash"),
    "no loss in the dict": (Misspelt, {}, {}, r"it returned a dict with the keys \['Loss'\]"),
    "logging a tensor": (Scalarless, {}, {}, r"self.log\('logits', ...\) was given a tensor of shape \(\d, 3\)"),
    "a layer that a hook appends": (Longer, {}, {}, "Longer got parameters that no stage has: left.3.weight, left.3.b"),
    "a layer that a hook trains": (Later, {}, {}, "no stage has: late.bias, late.weight.*__init__ or configure_model"),
    "a layer that a hook replaces": (Replaced, {}, {}, "'head' is another module than when the step was captured"),
    "a module without values": (Hopeless, {}, {}, r"'left.3' \(Bias\) was built on the meta device and has no reset"),
    "labels without a class": (Labelled, {}, {}, "fails on a mini-batch, in one process, too: IndexError: Target"),
    "an option of DDP": (
        *(TwoTowers, {"find_unused_parameters": True}, {}),
        "has no option 'find_unused_parameters'. Leave it out",
    ),
    "uneven pipelines": (TwoTowers, {"num_pipelines": 2}, {}, "num_pipelines=2 does not divide the 1 devices"),
}


def all_messages(rank: int) -> dict[str, str]:
    return {name: message_of(lambda case=case: fit(case)) for name, case in CASES.items()}


def fit(case: Case) -> None:
    kind, settings, options, _ = case
    harness.trainer(harness.strategy(**{"stages": None, **settings}), 1, **options).fit(kind().double(), loader())


def message_of(function: Callable[[], None]) -> str:
    try:
        function()
    except GPPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    found: list[dict[str, str]] = harness.run(1, all_messages)
    return found[0]


@pytest.mark.parametrize("name", CASES)
def test_runs(messages: dict[str, str], name: str) -> None:
    assert re.search(CASES[name][3], messages[name], re.DOTALL), messages[name]


@pytest.mark.parametrize("option", [{"weights": "stash"}, {"sharding": "fsdp"}, {"on_nonfinite": "skip"}])
def test_a_scaled_loss(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"does not go together with trainer.precision='16-mixed'.*bf16-mixed"):
        check_scaled(GPPStrategy(**option).options)


def test_batch_norm_is_not_averaged_from_micro_batches() -> None:
    trainer = harness.trainer(callbacks=[StochasticWeightAveraging(0.02)])
    trainer.strategy.connect(TwoTowers())
    with pytest.raises(ConfigError, match="computes the statistics of BatchNorm anew"):
        check_callbacks(trainer, num_devices=2)


@pytest.mark.parametrize("use", [lambda b: b[0], len, list, lambda b: b["x"], lambda b: b.size(0)])
def test_a_batch_used_where_there_is_none(use: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match=r"a rank that has none.*trainer.is_global_zero"):
        use(Placeholder(torch.empty(3, 0)))


def returns_early(rank: int) -> None:
    given = harness.strategy(step="micro_batches")
    harness.trainer(given, 2).fit(Early().double(), loader(), loader(10, seed=2))


def test_a_step_that_returns_early() -> None:
    with pytest.raises(AssertionError, match=r"(?s)returned before it called the module for this.*0 \* loss"):
        harness.run(2, returns_early)
