"""`strategy.slices`: whole runs equal plain ones, and a model that cannot be cut is found out before it is trained."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_gpp import ConfigError, GPPStrategy
from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.errors import SelfCheckError
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.sequence import causal_attention, positions
from lightning_gpp.slices import unsliced
from lightning_gpp.training.evaluation_plan import evaluation_plan
from lightning_gpp.training.planner import captured_step, plan_for, refitted
from tests.strategy import harness

WIDTH, TOKENS = 8, 12
CPU = torch.device("cpu")

STAGES: list[dict[str, Any]] = [
    {"name": "picture", "modules": ["picture"], "devices": [0]},
    {"name": "first", "modules": ["embedding", "blocks.0"], "devices": [1]},
    {"name": "last", "modules": ["blocks.1", "head", STEP], "devices": [0]},
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x).chunk(3, -1)
        return x + self.out(self.mixed(query, key, value))

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value)


class Both(Attention):
    """Mixes in earlier tokens and, by itself, all those that it sees."""

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value) + value.mean(1, keepdim=True)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, WIDTH), nn.Embedding(2 * TOKENS, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        return self.tokens(text) + self.places(self.where(text))

    def where(self, text: Tensor) -> Tensor:
        return positions(text)


class OwnCount(Embedding):
    def where(self, text: Tensor) -> Tensor:
        return torch.arange(text.size(1))


class Captions(pl.LightningModule):
    """Predicts the next token, from those before it and a picture that all of them see."""

    def __init__(self, embedding: type[nn.Module] = Embedding, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.picture = nn.Linear(5, WIDTH)
        self.embedding = embedding()
        self.blocks = nn.ModuleList([Attention(), attention()])
        self.head = nn.Linear(WIDTH, 7)
        self.losses: list[float] = []
        self.validated: list[float] = []

    def forward(self, picture: Tensor, text: Tensor) -> Tensor:
        x = self.embedding(text)
        x = self.blocks[0](x)
        return self.head(self.blocks[1](x + self.picture(picture)[:, None]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        picture, text = batch
        return nn.functional.cross_entropy(self(picture, text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(float(self.training_step(batch, batch_idx)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def batches(lengths: list[int] = [TOKENS] * 3, sizes: tuple[int, ...] = (8, 8, 5)) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 5, dtype=torch.float64, generator=generator),
            torch.randint(0, 7, (size, length + 1), generator=generator),
        )
        for size, length in zip(sizes, lengths, strict=True)
    ]


def model(**kinds: Any) -> Captions:
    torch.manual_seed(5)
    return Captions(**kinds).double()


def fitted(strategy: Any, devices: int, data: list[Any], **settings: Any) -> Captions:
    module = model()
    harness.trainer(strategy, devices, **settings).fit(module, _Listed(data), _Listed(data))
    return module


class _Listed(torch.utils.data.DataLoader[Any]):
    """Batches as they are given."""

    def __init__(self, data: list[Any]) -> None:
        super().__init__(data, batch_size=None)  # type: ignore[arg-type]


CASES: dict[str, dict[str, Any]] = {
    "number": {"slices": 3},
    "tokens": {"slices": [2, 9, 1], "schedule": "gpipe"},
    "found": {"slices": 2, "stages": None, "max_replicas": 1, "schedule": "zb_h1"},
    "recomputed": {"slices": 2, "recompute": True},
    "some": {"slices": 4, "slice_modules": ["blocks.1", "head"]},
}


def fit(rank: int, case: str, lengths: list[int]) -> tuple[list[float], list[float], bool]:
    strategy = harness.strategy(**{"stages": STAGES, "search_seconds": 0.5, **CASES[case]})
    module = fitted(strategy, 2, batches(lengths))
    assert strategy.plan is not None
    return module.losses, module.validated, strategy.plan.is_sliced


OTHER_LENGTHS = [TOKENS, 7, 2]


def fit_all(rank: int, cases: list[str]) -> list[tuple[list[float], list[float], bool]]:
    runs = [(case, [TOKENS] * 3) for case in cases] + [("number", OTHER_LENGTHS)]
    return [fit(rank, case, lengths) for case, lengths in runs]


@pytest.mark.parametrize("cases", [["tokens"], pytest.param([*CASES], marks=pytest.mark.acceptance)])
def test_whole_runs_equal_plain_ones(cases: list[str]) -> None:
    """Sequences of other lengths are cut into as many slices."""
    *found, other = harness.run(2, fit_all, cases)[0]
    for lengths, runs in (([TOKENS] * 3, found), (OTHER_LENGTHS, [other])):
        plain = fitted("auto", 1, batches(lengths))
        for losses, validated, sliced in runs:
            assert sliced
            assert losses == pytest.approx(plain.losses, rel=1e-12)
            assert validated == pytest.approx(plain.validated, rel=1e-12)


def fit_kinds(rank: int, kinds: dict[str, Any], settings: dict[str, Any]) -> None:
    strategy = harness.strategy(stages=STAGES, slices=2, **settings)
    harness.trainer(strategy, 2).fit(model(**kinds), _Listed(batches()))


def refused(rank: int, kinds: dict[str, Any]) -> None:
    with pytest.raises(SelfCheckError, match="strategy.slice_modules"):
        fit_kinds(rank, kinds, {})


def test_a_model_that_slices_would_change_is_found_out() -> None:
    harness.run_each(2, refused, [({"embedding": OwnCount},), ({"attention": Both},)])


def captured(step: str = "training_step", module: nn.Module | None = None) -> Capture:
    return capture_step(module or model(), batches()[0], step=step)


def planned(**settings: Any) -> Plan:
    return plan_for(captured(), GPPStrategy(**{"stages": STAGES, **settings}).options, 2)


def test_the_step_gets_a_stage_of_its_own_and_the_picture_stays_whole() -> None:
    plan = planned(slices=2)
    assert [stage.name for stage in plan.stages] == [
        "picture", "first[0:7]", "first[7:12]", "last[0:7]", "last[7:12]", "last step",
    ]  # fmt: skip
    whole = unsliced(plan).plan
    assert sum(stage.figures.num_parameters for stage in plan.stages) == sum(p.numel() for p in model().parameters())
    assert [stage.tokens for stage in whole.stages] == [None] * 4
    assert [edge.dst for edge in plan.edges if edge.src == 0] == [3, 4]


def test_a_plan_from_a_file_stays_cut_and_can_be_cut_anew(tmp_path: Path) -> None:
    plan = planned(slices=[4, 8])
    plan.save(path := tmp_path / "plan.yaml")
    for settings, expected in (({}, [4, 12]), ({"slices": 3}, [5, 9, 12])):
        found = plan_for(captured(), GPPStrategy(plan=path, **settings).options, 2)
        stops = [stage.tokens[1] for stage in found.stages if stage.tokens is not None and stage.name.startswith("fir")]
        assert stops == expected
    assert plan_for(captured(), GPPStrategy(plan=path).options, 2) == plan


def test_other_forms_of_the_plan() -> None:
    plan = planned(slices=3, recompute=["first"], chain_baseline=True)
    assert refitted(captured(), plan) == plan
    assert not evaluation_plan(captured("validation_step"), plan).is_sliced
    assert [stage.name for stage in plan.stages if stage.recompute] == ["first[0:5]", "first[5:9]", "first[9:12]"]
    assert sum(edge.artificial for edge in plan.edges) == 3  # from the picture to the slices of the first stage


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"slices": 0}, r"strategy.slices is 0; it must be a whole number >= 1, or the tokens"),
        ({"slice_modules": ["head"]}, r"strategy.slice_modules=\['head'\] .* is given without the number of slices"),
        ({"slices": 2, "sharding": "fsdp"}, r"strategy.sharding=fsdp and strategy.slices cannot.*sharding=zero1"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        GPPStrategy(**settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"slices": 13}, "strategy.slices=13 is more than the 12 tokens"),
        ({"slices": [4, 4]}, r"strategy.slices=\[4, 4\] are 8 tokens in total, a sample has 12"),
        ({"slices": 2, "slice_modules": ["heads"]}, r"strategy.slice_modules lists \['heads'\], which the training"),
        ({"slices": 2, "slice_modules": ["picture"]}, "no stage can be sliced"),
    ],
)
def test_settings_that_do_not_fit_the_model(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        planned(**settings)


def test_a_model_that_says_nothing() -> None:
    options = GPPStrategy(stages=harness.STAGES, slices=2).options
    module = harness.make_module()
    module.log = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    with pytest.raises(ConfigError, match=r"does not say what a token needs .*lightning_gpp.sequence"):
        plan_for(capture_step(module, harness.make_data(8)[:]), options, 2)


class Checkpointed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_checkpoints_that_carry() -> None:
    options = GPPStrategy(stages=STAGES, slices=2).options
    with pytest.raises(ConfigError, match=r"'blocks.1' carries to later tokens \(.*inside activation checkpointing"):
        captured_step(model(attention=Checkpointed), batches()[0], "training_step", options, nullcontext, CPU)
