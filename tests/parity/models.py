"""What parity is shown on: the three examples and five models of `transformers`, each with two and four stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_gpp.capture.batch import map_samples
from tests.models import MODELS


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in float64, its batches, and its modules in four stages.

    `joins`: pairs of the four stages make two. `whole_batch`: the loss needs all samples at once, so the last stage
    takes the mini-batch whole.
    """

    module: Any
    batch: Any
    stages: list[list[str]]
    whole_batch: bool = False

    def halves(self) -> list[list[str]]:
        count = len(self.stages)
        return [sum(self.stages[: count // 2], []), sum(self.stages[count // 2 :], [])]


def two_tower() -> Subject:
    from gpp_examples.two_tower import CaptionedDigits, TwoTower

    data = CaptionedDigits(batch_size=8, num_captions=2)
    module = TwoTower(width=16, num_layers=2)
    stages = [["image_tower"], ["text_tower"], ["head"]]
    return Subject(module=module, batch=_first(data), stages=stages)


def feature_towers() -> Subject:
    from gpp_examples.feature_towers import BreastCancer, FeatureTowers

    stages = [["mean_tower"], ["error_tower"], ["worst_tower"], ["trunk"]]
    return Subject(module=FeatureTowers(width=8, num_layers=2), batch=_first(BreastCancer(batch_size=8)), stages=stages)


def gpt_text() -> Subject:
    from gpp_examples.gpt_text import GPT, PythonTopics

    module = GPT(width=16, num_layers=4, num_heads=2, context=16)
    stages = [["embedding", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "norm", "head"]]
    return Subject(module=module, batch=_first(PythonTopics(batch_size=8, context=16)), stages=stages)


def _first(data: Any) -> Any:
    torch.manual_seed(0)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def _transformers(name: str) -> Callable[[], Subject]:
    def make() -> Subject:
        module, batch, stages = MODELS[name]()
        return Subject(module=module, batch=batch, stages=stages, whole_batch=name == "clip")

    return make


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "two_tower": two_tower,
    "feature_towers": feature_towers,
    "gpt_text": gpt_text,
    **{name: _transformers(name) for name in MODELS},
}


def subject(name: str) -> Subject:
    """The subject in float64, with the same weights in every process."""
    torch.manual_seed(3)
    found = SUBJECTS[name]()
    return Subject(
        module=found.module.double(),
        batch=doubled(found.batch),
        stages=found.stages,
        whole_batch=found.whole_batch,
    )


def doubled(batch: Any) -> Any:
    """Floating-point tensors as float64."""

    def convert(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return map_samples(batch, len(next(iter(torch.utils._pytree.tree_leaves(batch)))), convert, list)
