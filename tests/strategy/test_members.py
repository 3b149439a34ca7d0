"""Devices of one plan with different numbers of processes give the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Subset

from lightning_gpp import ConfigError, GPPStrategy
from tests.sampling import sample
from tests.strategy.harness import run, strategy, trainer
from tests.strategy.parallel_models import SAMPLES, Branches, Tower, loader, make
from tests.strategy.test_tensor_parallel import CLIPPED, Result, alone, assert_same, outcome

Stages = list[dict[str, Any]]


def chain(*members: int) -> Stages:
    """Two stages on devices with these numbers of members; the first device runs the step."""
    first, second = members
    return [
        {"modules": ["layers.0"], "devices": [1], "tensor_parallel_size": second},
        {"modules": ["layers.1", "head", "@step"], "devices": [0], "tensor_parallel_size": first},
    ]


def branches(first: int, left: int, right: int) -> Stages:
    """Two branches that join on the first device, on devices with these numbers of members."""
    return [
        {"modules": ["layers.0"], "devices": [1], "tensor_parallel_size": left},
        {"modules": ["layers.1"], "devices": [2], "tensor_parallel_size": right},
        {"modules": ["layers.2", "head", "@step"], "devices": [0], "tensor_parallel_size": first},
    ]


REPLICATED: Stages = [
    {"modules": ["layers.0"], "devices": [1, 2], "tensor_parallel_size": 2},
    {"modules": ["layers.1", "head", "@step"], "devices": [0]},
]


def fit(rank: int, world: int, kind: type[Tower], options: dict[str, Any], settings: dict[str, Any]) -> Result:
    module = make(kind)
    used = trainer(strategy(num_micro_batches=2, **options), devices=world, **settings)
    used.fit(module, loader(), loader())
    return outcome(module, used, rank)


CASES: dict[str, tuple[int, type[Tower], dict[str, Any]]] = {
    "1 to 2": (3, Tower, {"stages": chain(2, 1)}),
    "2 to 1, zero-bubble": (3, Tower, {"stages": chain(1, 2), "schedule": "zb_h1"}),
    "1 and 2 to 1": (4, Branches, {"stages": branches(1, 1, 2)}),
    "replicas with 2 to 1, zero1": (5, Tower, {"stages": REPLICATED, "sharding": "zero1"}),
}


@pytest.mark.parametrize("case", sample(CASES, ["1 and 2 to 1"]))
def test_losses_and_weights_are_those_of_one_process(case: str) -> None:
    world, kind, options = CASES[case]
    assert_same(run(world, fit, world, kind, options, CLIPPED), alone(kind, **CLIPPED))


def fit_pipelines(rank: int) -> Result:
    """Each of two pipelines trains on every other sample."""
    module, options = make(), {"stages": chain(1, 2), "num_micro_batches": 2, "num_pipelines": 2}
    used = trainer(strategy(**options), devices=6, use_distributed_sampler=False, **CLIPPED)
    data = loader().dataset
    used.fit(module, DataLoader(Subset(data, range(rank // 3, SAMPLES, 2)), batch_size=4))
    return outcome(module, used, rank)


@pytest.mark.acceptance
def test_pipelines_have_different_numbers_of_processes() -> None:
    found, expected = run(6, fit_pipelines), alone(**CLIPPED)
    losses = [sum(pair) / 2 for pair in zip(found[0]["losses"], found[3]["losses"], strict=True)]
    assert_same([{**found[0], "losses": losses, "metrics": {}}], {**expected, "metrics": {}})


class Careful(Tower):
    """Divides itself only where there are several processes."""

    least = 2

    def configure_model(self) -> None:
        if self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() >= self.least:
            super().configure_model()


class TooCareful(Careful):
    """Divides itself nowhere, with two processes."""

    least = 3


class Tied(Tower):
    """Has one parameter in both stages."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layers[1].norm.weight = self.layers[0].norm.weight


def train(rank: int, world: int, kind: type[Tower], stages: Stages, dropout: float = 0.0) -> list[float]:
    module, used = make(kind, dropout=dropout), trainer(strategy(stages=stages, seed=3), devices=world, max_epochs=1)
    used.fit(module, loader())
    return module.losses


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (TooCareful, "tensor_parallel_size=2, but the module is not divided among processes"),
        (Tied, r"'layers.0' and 'layers.1.*' use the same parameter, 'layers.0.norm.weight', but have .*=2 and 1"),
    ],
)
def test_modules_that_are_refused(kind: type[Tower], text: str) -> None:
    with pytest.raises(AssertionError, match=f"ConfigError: .*{text}"):
        run(3, train, 3, kind, chain(1, 2))


# -- settings ---------------------------------------------------------------------------------------------------------


def test_stages_with_different_numbers_need_devices() -> None:
    stages = [{key: value for key, value in stage.items() if key != "devices"} for stage in chain(1, 2)]
    with pytest.raises(
        ConfigError, match=r"different numbers of processes .*\[2, 1\].* Give every stage the key devices"
    ):
        GPPStrategy(stages=stages)


@pytest.mark.parametrize("options", [{"sharding": "fsdp"}, {"weights": "stash"}, {"trace": True}], ids=str)
def test_options_that_members_cannot_do_together(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not go together with tensor_parallel_size=2 of a stage in strategy.st"):
        GPPStrategy(stages=chain(1, 2), **options)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def fit_once(rank: int, world: int, stages: Any, folder: str, path: str | None, kind: str) -> list[float]:
    """Train an epoch, from a checkpoint if there is one, and save."""
    module = make()
    options = {"stages": stages, "num_micro_batches": 2, "state_dict_type": kind}
    used = trainer(strategy(**options), devices=world, max_epochs=2 if path else 1)
    used.fit(module, loader(), ckpt_path=path)
    used.save_checkpoint(f"{folder}/{world}.ckpt")
    return module.losses


RESUMED: dict[str, tuple[str, Any, Any]] = {
    "folder, 1 and 2 to 2 and 1": ("sharded", (3, chain(1, 2)), (3, chain(2, 1))),
    "folder, one process to 1 and 4": ("sharded", (1, {"layers": 0, "head": 0}), (5, chain(1, 4))),
    "file, 4 and 1 to one process": ("full", (5, chain(4, 1)), (1, {"layers": 0, "head": 0})),
}


@pytest.mark.parametrize("case", sample(RESUMED, [*RESUMED][:1]))
def test_resumes_with_other_numbers(case: str, tmp_path: Path) -> None:
    kind, before, after = RESUMED[case]
    first = run(before[0], fit_once, *before, str(tmp_path / "before"), None, kind)[0]
    path = f"{tmp_path}/before/{before[0]}.ckpt"
    second = run(after[0], fit_once, *after, str(tmp_path / "after"), path, kind)[0]
    assert [*first, *second] == pytest.approx(alone()["losses"], rel=1e-12)
