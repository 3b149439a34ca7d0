"""Fully sharded stages: what a replica keeps and when, whatever computes with the gathered parameters in between."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_gpp.errors import PlanError
from lightning_gpp.runtime import Mesh
from lightning_gpp.runtime.sharding import ShardedStages
from lightning_gpp.runtime.sharding.shards import local
from tests.distributed import run_distributed
from tests.runtime.replicas import assert_close


class Even(nn.Module):
    """48 KB that 2 and 3 divide, frozen or trained, in two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(60, 60, dtype=torch.float64)
        self.second = nn.Linear(60, 60, dtype=torch.float32)
        self.third = nn.Linear(60, 60, dtype=torch.float32)
        self.register_parameter("index", Parameter(torch.arange(60), requires_grad=False))
        self.third.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x[:, self.index]).float()
        return self.third(self.second(x)).sum()


def _of_one_stage(module: nn.Module, rank: int, num_replicas: int) -> ShardedStages:
    parameters = dict(module.named_parameters())
    holders = dict.fromkeys(parameters, tuple(range(num_replicas)))
    return ShardedStages(
        module, parameters, holders, Mesh(num_replicas, 1, rank), stages=dict.fromkeys(parameters, (4,))
    )


def _nbytes(tensors: list[Any]) -> int:
    """Of the storages, each counted once."""
    storages = [local(tensor.detach()).untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _memory(rank: int, num_replicas: int) -> dict[str, int]:
    module = Even()
    sizes = {"whole": _nbytes(list(module.parameters()))}
    sharding = _of_one_stage(module, rank, num_replicas)
    shards = list(module.parameters())
    sizes["shards"] = _nbytes(shards)
    sharding.ready(4)
    gathered = list(module.parameters())
    sizes["gathered"] = _nbytes(gathered)
    loss = module(torch.ones(1, 60, dtype=torch.float64))
    sharding.reshard(4)
    sizes["between"] = _nbytes(gathered)
    sharding.unshard(4)
    sharding.ready(4)
    assert [id(parameter) for parameter in module.parameters()] == [id(parameter) for parameter in gathered]
    loss.backward()
    sharding.reduce(4)
    sharding.sync()
    sharding.reshard(4)
    assert [id(parameter) for parameter in module.parameters()] == [id(shard) for shard in shards]
    sizes["after"] = _nbytes([*gathered, *(parameter.grad for parameter in gathered)])
    sizes["gradients"] = _nbytes([shard.grad for shard in shards])
    sizes["trained"] = sum(shard.numel() * shard.element_size() for shard in shards if shard.requires_grad)
    return sizes


def test_a_replica_keeps_its_share() -> None:
    for sizes in run_distributed(3, _memory, 3):
        assert sizes["whole"] == sizes["gathered"] == sizes["shards"] * 3
        assert sizes["between"] == sizes["after"] == 0
        assert sizes["gradients"] * 3 == sizes["trained"]


def _changed(rank: int) -> dict[str, Any]:
    """What users do to parameters while they are sharded, and between."""
    module = Even()
    vars(module.first.weight)["note"] = "kept"
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    sharding = _of_one_stage(module, rank, 2)
    notes = [module.first.weight.note]
    with torch.inference_mode():  # gathered for the first time by a validation
        sharding.ready(4)
        notes.append(module.first.weight.note)
        validation = module(torch.ones(1, 60, dtype=torch.float64)).item()
        sharding.reshard(4)
    module.first.requires_grad_(False)
    module.third.requires_grad_(True)
    sharding.ready(4)
    module(torch.full((1, 60), rank + 1.0, dtype=torch.float64)).backward()
    assert module.first.weight.grad is None
    sharding.reduce(4)
    sharding.sync()
    sharding.reshard(4)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    grads = {name: p.grad.full_tensor() for name, p in module.named_parameters() if p.grad is not None}
    sharding.restore()
    assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    same = all(torch.equal(before[name], p) for name, p in copied.named_parameters())
    notes.append(module.first.weight.note)
    return {"validation": validation, "frozen": frozen, "grads": grads, "same": same, "notes": notes}


def test_freezing_validation_and_the_end_of_a_run() -> None:
    torch.manual_seed(0)
    for result in run_distributed(2, _seeded, "_changed"):
        module = _reference()
        module.third.requires_grad_(True)
        for rank in range(2):
            module(torch.full((1, 60), rank + 1.0, dtype=torch.float64)).backward()
        assert result["validation"] == pytest.approx(module(torch.ones(1, 60, dtype=torch.float64)).item(), rel=1e-5)
        assert result["frozen"] == ["index", "first.weight", "first.bias"]
        assert set(result["grads"]) == {
            f"{layer}.{name}" for layer in ("second", "third") for name in ("weight", "bias")
        }
        for name, grad in result["grads"].items():
            torch.testing.assert_close(grad, module.get_parameter(name).grad, rtol=1e-5, atol=1e-5)
        assert result["same"]
        assert result["notes"] == ["kept"] * 3


def _reference() -> Even:
    torch.manual_seed(5)
    return Even()


def _seeded(rank: int, name: str) -> Any:
    torch.manual_seed(5)
    return globals()[name](rank)


class Unusual(nn.Module):
    """Parameters that are not attributes of plain layers, and one that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.listed = nn.ParameterList([torch.ones(3), torch.ones(2)])
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(self.one(self.normed(self.recurrent(x)[0])))
        return x.square().sum() * self.listed[0].sum() * self.listed[1].sum()


def _unusual(rank: int) -> dict[str, Tensor]:
    module = Unusual().double()
    sharding = _of_one_stage(module, rank, 2)
    assert module.one.weight is module.other.weight
    sharding.ready(4)
    assert module.one.weight is module.other.weight
    module(torch.full((1, 2, 4), rank + 1.0, dtype=torch.float64)).backward()
    sharding.sync()  # makes up for a reduce that nobody called
    sharding.reshard(4)
    return {n: p.grad.full_tensor() for n, p in module.named_parameters() if p.grad is not None}


def test_parameters_in_unusual_places() -> None:
    torch.manual_seed(5)
    module = Unusual().double()
    for rank in range(2):
        module(torch.full((1, 2, 4), rank + 1.0, dtype=torch.float64)).backward()
    expected = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    for grads in run_distributed(2, _seeded, "_unusual"):
        assert_close(grads, expected)


HOLDERS = {"0": (0, 1), "1": (1, 2)}
"""Stage 0 has its replicas on ranks 0 and 1, stage 1 on ranks 1 and 2."""


def _overlapping(rank: int) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(1)
    module = nn.ModuleList(nn.Linear(4, 5, dtype=torch.float64) for _ in range(3))
    grads = {name: torch.full_like(p, float(len(name))) for name, p in module.named_parameters()}
    ranks = {name: HOLDERS.get(name[0], (2,)) for name in grads}
    for name, parameter in module.named_parameters():
        if rank not in ranks[name]:
            setattr(module[int(name[0])], name[2:], Parameter(parameter.to("meta")))
    mine = {name: p for name, p in module.named_parameters() if rank in ranks[name]}
    stages = {name: (int(name[0]),) for name in grads}
    sharding = ShardedStages(module, mine, ranks, Mesh(3, 1, rank), stages=stages)
    for stage in (2, 1, 0):
        sharding.ready(stage)
        for name in mine:
            if stages[name] == (stage,):
                module.get_parameter(name).grad = grads[name] * 10**rank
        sharding.reduce(stage)
        sharding.reshard(stage)
    sharding.sync()
    norm = float(sharding.grad_norm())
    found = {name: module.get_parameter(name).grad for name in mine}
    return norm, {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def test_stages_with_different_replicas() -> None:
    sums = {"0": 11.0, "1": 110.0, "2": 100.0}
    sizes = {"weight": 20, "bias": 5}
    squares = [s**2 * n * len(f"0.{k}") ** 2 for s in sums.values() for k, n in sizes.items()]
    for rank, (norm, grads) in enumerate(run_distributed(3, _overlapping)):
        assert norm == pytest.approx(sum(squares) ** 0.5, rel=1e-14)
        assert {name[0] for name in grads} == [{"0"}, {"0", "1"}, {"1", "2"}][rank]
        assert all(bool((grad == sums[name[0]] * len(name)).all()) for name, grad in grads.items())


def _refused(rank: int) -> str:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].weight = module[0].weight
    parameters = dict(module.named_parameters())
    stages = {"0.weight": (0, 1), "0.bias": (0,), "1.bias": (1,)}
    with pytest.raises(PlanError) as refusal:
        ShardedStages(module, parameters, dict.fromkeys(parameters, (0, 1)), Mesh(2, 1, rank), stages=stages)
    dist.barrier()
    return str(refusal.value)


def test_tied_parameters_of_two_stages_are_refused() -> None:
    for message in run_distributed(2, _refused):
        assert "parameter '0.weight' is used by the stages 0 and 1" in message
        assert "strategy.sharding=zero1" in message
