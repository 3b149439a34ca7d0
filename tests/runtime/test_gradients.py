"""Gradients are summed once over all holders, and a norm counts each parameter once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.runtime import GradientSync, Mesh, gradients
from tests.distributed import run_distributed

HOLDERS = {"alone": (1,), "all": (0, 1, 2), "pair": (0, 2), "half": (0, 2), "never": (0, 2), "frozen": (0, 2)}


def _parameters(rank: int) -> dict[str, Parameter]:
    parameters = {name: Parameter(torch.ones(2, 3, dtype=torch.float64)) for name, r in HOLDERS.items() if rank in r}
    if rank in HOLDERS["half"]:
        parameters["half"] = Parameter(torch.ones(3))
        parameters["frozen"].requires_grad_(False)
    for name, parameter in parameters.items():
        if name not in ("never", "frozen") and not (name == "half" and rank == 2):
            parameter.grad = torch.full_like(parameter, 10.0**rank)
    return parameters


def _sync(rank: int, bucket_bytes: int) -> tuple[dict[str, Tensor | None], list[float]]:
    gradients.BUCKET_BYTES = bucket_bytes  # type: ignore[misc]
    mesh = Mesh(3, 1, rank)
    parameters = _parameters(rank)
    sync = GradientSync(parameters, HOLDERS, mesh)
    sync.sync()
    norms = [float(sync.grad_norm(p)) for p in (2.0, 1.0, math.inf)]
    return {name: parameter.grad for name, parameter in parameters.items()}, norms


@pytest.mark.parametrize("bucket_bytes", [1, 25 * 2**20])
def test_sums_over_holders(bucket_bytes: int) -> None:
    expected = {"alone": 10.0, "all": 111.0, "pair": 101.0, "half": 1.0, "never": None, "frozen": None}
    vector = torch.tensor([10.0] * 6 + [111.0] * 6 + [101.0] * 6 + [1.0] * 3, dtype=torch.float64)
    for rank, (grads, norms) in enumerate(run_distributed(3, _sync, bucket_bytes)):
        assert set(grads) == {name for name, ranks in HOLDERS.items() if rank in ranks}
        for name, grad in grads.items():
            value = expected[name]
            assert (grad is None) if value is None else (grad is not None and bool((grad == value).all())), (rank, name)
        wanted = [float(torch.linalg.vector_norm(vector, p)) for p in (2.0, 1.0, math.inf)]
        assert norms == pytest.approx(wanted, rel=1e-14)


def _refused(rank: int) -> list[str]:
    mesh = Mesh(2, 1, rank)
    messages = []
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    sync = GradientSync({"table": embedding.weight}, {"table": (0, 1)}, mesh)
    for attempt in (sync.sync, lambda: sync.grad_norm(0)):
        try:
            attempt()
        except GPPError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_what_cannot_be_summed_is_refused() -> None:
    for sparse, norm in run_distributed(2, _refused):
        assert "'table' has a sparse gradient" in sparse
        assert norm.startswith(ConfigError.__name__)
        assert "use a number above 0" in norm
