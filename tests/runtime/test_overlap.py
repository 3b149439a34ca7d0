"""Sums of gradients start while the last backward runs, in one order on all ranks, whatever order gradients come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from lightning_gpp.errors import GPPError
from lightning_gpp.runtime import GradientSync, Mesh, gradients
from lightning_gpp.runtime.gradients import Bucket
from lightning_gpp.runtime.sharding import OwnedParameters, assign_owners
from tests.distributed import run_distributed, run_each

NAMES = ["a", "b", "c", "tied", "other"]
STAGES = {"a": (0,), "b": (0,), "c": (0,), "tied": (0, 1), "other": (1,)}


class Diary:
    """When which bucket starts: names of its parameters, "|" after every backward."""

    def __init__(self, monkeypatch: Any) -> None:
        self.entries: list[str] = []
        start: Callable[[Bucket], None] = Bucket.start

        def noted(bucket: Bucket) -> None:
            self.entries.append("+".join(bucket.named))
            start(bucket)

        monkeypatch.setattr(Bucket, "start", noted)


def _parameters() -> dict[str, Parameter]:
    return {name: Parameter(torch.ones(2, dtype=torch.float64)) for name in NAMES}


def _sync(rank: int, parameters: dict[str, Parameter], num_ranks: int = 2) -> GradientSync:
    holders = dict.fromkeys(parameters, tuple(range(num_ranks)))
    return GradientSync(parameters, holders, Mesh(num_ranks, 1, rank), stages=STAGES)


def _recorded(rank: int, uses: list[list[str]], bucket_bytes: int, armed: bool) -> tuple[list[str], dict[str, Any]]:
    """`uses[rank]`: parameters in the order in which this rank's stage 0 uses them; gradients come in reverse."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
        diary = Diary(monkeypatch)
        parameters = _parameters()
        sync = _sync(rank, parameters)
        for last in (False, True):
            x = torch.ones(2, dtype=torch.float64)
            for name in uses[rank]:
                x = x * parameters[name]
            if last and armed:
                sync.arm(0)
            (x.sum() * (rank + 1)).backward()
            diary.entries.append("|")
        sync.reduce(0)
        diary.entries.append("reduced")
        sync.sync()
        return diary.entries, {name: parameter.grad for name, parameter in parameters.items()}


CASES = [
    # In the order of registration on both ranks: every bucket starts in the second backward.
    ([["a", "b", "c"]] * 2, 1, True, ["| c b a | reduced other tied"] * 2),
    # Not armed: after it.
    ([["a", "b", "c"]] * 2, 1, False, ["| | c b a reduced other tied"] * 2),
    # Rank 1 gets the gradient of a first, but c starts first there, too.
    ([["a", "b", "c"], ["c", "b", "a"]], 1, True, ["| c b a | reduced other tied"] * 2),
    # Rank 1 has no gradient of b: a waits, and must not overtake b.
    ([["a", "b", "c"], ["a", "c"]], 1, True, ["| c b a | reduced other tied", "| c | b a reduced other tied"]),
    # Rank 1 has no gradient at all; a tied parameter waits for the end.
    ([["tied", "a", "b", "c"], []], 1, True, ["| c b a | reduced other tied", "| | c b a reduced other tied"]),
    # One bucket for each stage, and one for what stages share.
    ([["a", "b", "c"]] * 2, 1 << 20, True, ["| c+b+a | reduced other tied"] * 2),
]
"""Uses, bytes of a bucket, whether the last backward is armed, and what ranks note."""


def test_buckets_start_in_order() -> None:
    cases = [([names or ["other"] for names in uses], size, armed) for uses, size, armed, _ in CASES]
    for (uses, *_), (*_, diaries), found in zip(cases, CASES, run_each(2, _recorded, cases), strict=True):
        for (entries, grads), diary in zip(found, diaries, strict=True):
            assert " ".join(entries) == diary
            for name in NAMES:
                total = sum(2.0 * (user + 1) for user in range(2) if name in uses[user])
                assert (grads[name] is None) if not total else bool((grads[name] == total).all()), name


def _twice(rank: int) -> list[str]:
    """A module that is used in two re-entrant checkpoints gets two gradients in one backward."""
    messages = []
    for reentrant in (True, False):
        layer = nn.Linear(2, 2).double()
        sync = GradientSync(
            dict(layer.named_parameters()),
            {"weight": (0, 1), "bias": (0, 1)},
            Mesh(2, 1, rank),
            stages={"weight": (0,), "bias": (0,)},
        )
        x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        sync.arm(0)
        try:
            x.sum().backward()
        except GPPError as error:
            messages.append(str(error))
        sync.sync()
    return messages


def test_a_gradient_that_comes_twice_is_refused() -> None:
    for messages in run_distributed(2, _twice):
        assert len(messages) == 1
        assert "received a second gradient in the last backward of its stage" in messages[0]
        assert "use_reentrant=False" in messages[0]


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    num_ranks=st.integers(1, 5),
    frozen=st.sets(st.integers(0, 11)),
)
def test_owners_are_balanced(sizes: list[int], num_ranks: int, frozen: set[int]) -> None:
    parameters: dict[str, Tensor] = {
        str(i): Parameter(torch.empty(size, device="meta"), i not in frozen) for i, size in enumerate(sizes)
    }
    owners = assign_owners(parameters, dict.fromkeys(parameters, range(num_ranks)))
    assert list(owners) == list(parameters)
    for trained in (True, False):
        kept = [n for n, p in parameters.items() if p.requires_grad or not trained]
        loads = [sum(parameters[n].nbytes for n in kept if owners[n] == rank) for rank in range(num_ranks)]
        assert max(loads) - min(loads) <= max((parameters[n].nbytes for n in kept), default=0)


def _published(rank: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)  # more broadcasts than may be under way
        mesh = Mesh(3, 1, rank)
        holders = {**{f"p{i}": (0, 1) for i in range(8)}, "q": (1, 2), "alone": (2,), "frozen": (0, 1, 2)}
        owners = {**{f"p{i}": i % 2 for i in range(8)}, "q": 2, "alone": 2, "frozen": 1}
        parameters = {n: Parameter(torch.full((2, 3), float(rank)).t()) for n, r in holders.items() if rank in r}
        parameters["frozen"].requires_grad_(False)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        owned = OwnedParameters(parameters, holders, owners, mesh)
        owned.publish(name for name in holders if name != "p7")
        return {name: (p.detach().unique().tolist(), p.grad is not None) for name, p in parameters.items()}


def test_holders_get_the_values_of_owners() -> None:
    results = run_distributed(3, _published)
    for rank in (0, 1):
        for i in range(7):
            assert results[rank][f"p{i}"] == ([i % 2], rank == i % 2)
        assert results[rank]["p7"] == ([rank], True)
        assert results[rank]["frozen"] == ([rank], False)
    assert results[1]["q"] == ([2], False)
    assert results[2]["q"] == ([2], True)
    assert results[2]["alone"] == ([2], True)
