"""Ranks that disagree end at set-up, on all of them, with the first difference, both values and the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping

from lightning_gpp.errors import ConfigError
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.training.tensors.joining import check_alike, facts_of_optimizers, text_of
from tests.distributed import run_distributed
from tests.strategy import harness
from tests.strategy.harness import TwoTowers


class Wider(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(4, 4 + dist.get_rank())


class Longer(TwoTowers):
    """With the same parameters everywhere."""

    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() == 1:
            self.left.append(torch.nn.Tanh())


PRECISIONS = ("64-true", "bf16-mixed")


class Frozen(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(dist.get_rank() == 0)


class Rate(TwoTowers):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * (1 + self.trainer.global_rank))


Fit = Callable[[int], object]


def fit(
    strategy: dict[str, Any] | None = None, module: type[TwoTowers] = TwoTowers, n: int = 16, **trainer: Any
) -> None:
    model = module().double()
    harness.trainer(harness.strategy(**strategy or {}), devices=2, **trainer).fit(
        model, harness.loader(n), harness.loader()
    )


CASES: dict[str, tuple[Fit, str]] = {
    "option": (
        lambda rank: fit({"num_micro_batches": 2 + 2 * rank}),
        r"disagree on strategy.num_micro_batches: it is 2 on rank 0, but 4 on rank 1\.",
    ),
    "epochs": (lambda rank: fit(max_epochs=1 + rank), r"disagree on trainer.max_epochs: it is 1 on rank 0, but 2 on"),
    "rate": (
        lambda rank: fit(module=Rate),
        r"disagree on 'lr' in group 0 of optimizer 0: it is 0.1 on rank 0, but 0.2",
    ),
    "width": (
        lambda rank: fit(module=Wider),
        r"disagree on parameter 'unused.weight': it is \[4, 4\] torch.float64, trained on rank 0, but \[5, 4\]",
    ),
    "module": (lambda rank: fit(module=Longer), r"on the module 'left.3': it is missing on rank 0, but Tanh\(\) on"),
    "frozen": (lambda rank: fit(module=Frozen), "'head.weight': it is .*, trained on rank 0, but .*, frozen on rank 1"),
    "precision": (lambda rank: fit(precision=PRECISIONS[rank]), "disagree on trainer.precision: it is '64-true' on"),
    "early stopping": (
        lambda rank: fit(callbacks=[EarlyStopping("loss")][rank:]),
        r"callbacks that monitor a value .*: it is \['EarlyStopping'\] on rank 0, but \[\] on rank 1",
    ),
    "length": (lambda rank: fit(n=16 + 8 * rank), r"number of training batches .*: it is 2 on rank 0, but 3 on rank 1"),
}


def refused(rank: int, name: str) -> str:
    """The message on this rank, whose failure is not reported to the other: each has to find it by itself."""
    FailureMonitor.report = lambda self, error: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as caught:
        CASES[name][0](rank)
    return str(caught.value)


def each_refused(rank: int, names: list[str]) -> list[str]:
    return [refused(rank, name) for name in names]


def test_the_first_difference_is_named_on_all_ranks() -> None:
    for messages in harness.run(2, each_refused, list(CASES)):
        for message, (_, pattern) in zip(messages, CASES.values(), strict=True):
            assert re.search(pattern, message), message


def differences(rank: int) -> str:
    check_alike({"a": "1", "b": text_of(object())})
    with pytest.raises(ConfigError) as caught:
        check_alike({"a": "1", "b": "long" * 100 if rank == 2 else "x", **({"c": "2"} if rank else {})})
    dist.barrier()
    return str(caught.value)


def test_addresses_do_not_count_and_values_are_shortened() -> None:
    first, *others = run_distributed(4, differences)
    assert others == [first] * 3
    assert "disagree on b: it is x on ranks 0, 1, 3, but longlong" in first
    assert len(first) < 700


def test_learning_rates_in_tensors_are_compared_by_value() -> None:
    """Those of two ranks may be on two GPUs."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    kinds = (torch.optim.SGD(parameters, lr=rate) for rate in (0.5, torch.tensor(0.5)))
    plain, tensor = (facts_of_optimizers([kind]) for kind in kinds)
    assert plain == tensor
