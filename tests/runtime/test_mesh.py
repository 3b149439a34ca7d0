"""Ranks, groups, and tensors of every kind between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime import DistributedTransport, Mesh, pairs_of
from lightning_gpp.runtime.boundary import DTYPES
from tests.distributed import each, run_distributed, run_each
from tests.strategies import plan_of, towers


def _describe(rank: int) -> dict[str, Any]:
    mesh = Mesh(2, 2, rank)
    groups = {
        "pipeline": mesh.pipeline_group,
        "replica": mesh.replica_group,
        "control": mesh.control_group,
        "pipeline control": mesh.pipeline_control_group,
    }
    ranks = {name: tuple(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    return {"at": (mesh.pipeline, mesh.device), "peer": mesh.global_rank(1 - mesh.device), **ranks}


def test_rank_is_pipeline_times_devices_plus_device() -> None:
    for rank, found in enumerate(run_distributed(4, _describe)):
        row = (0, 1) if rank < 2 else (2, 3)
        column = (0, 2) if rank % 2 == 0 else (1, 3)
        assert found["at"] == divmod(rank, 2)
        assert found["peer"] == row[1 - rank % 2]
        assert found["pipeline"] == found["pipeline control"] == row
        assert found["replica"] == column
        assert found["control"] == (0, 1, 2, 3)


def _describe_members(rank: int) -> dict[str, Any]:
    mesh = Mesh(2, 1, rank, members=2)
    groups = [mesh.pipeline_group, mesh.replica_group, mesh.control_group, mesh.member_group]
    users = mesh.device_mesh("cpu")
    assert users is not None
    return {
        "at": (mesh.rank, mesh.member, mesh.device),
        "groups": [() if group is None else tuple(dist.get_process_group_ranks(group)) for group in groups],
        "members": users["tensor_parallel"].mesh.tolist(),
        "data": users["data_parallel"].mesh.tolist(),
        "plane": [mesh.process(rank) for rank in range(mesh.world_size)],
        "links": mesh.links(0, 1),
    }


def test_members_of_devices_form_planes() -> None:
    for process, found in enumerate(run_distributed(4, _describe_members)):
        plane, group = [process % 2, process % 2 + 2], (process // 2 * 2, process // 2 * 2 + 1)
        assert found["at"] == (process // 2, process % 2, process // 2)
        assert found["groups"] == [(0, 1, 2, 3), (process,), (0, 1, 2, 3), group]
        assert (found["members"], found["data"]) == (list(group), [process])
        assert found["plane"] == plane
        assert found["links"] == [(0, 2), (1, 3)]


def _wrong_size(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"needs 6 processes, but there are 2 \(trainer.devices"):
        Mesh(3, 2, rank)


def _wrong_members(rank: int) -> None:
    with pytest.raises(ConfigError, match="with 2 processes per device, which needs 8 processes, but there are 2"):
        Mesh(2, 2, rank, members=2)


def test_number_of_processes_must_fit() -> None:
    run_each(2, each, [(_wrong_size, [()]), (_wrong_members, [()])])


def test_pairs_are_those_of_the_edges_and_of_the_gradients_that_come_back() -> None:
    assert pairs_of(towers(2, 1, 4)) == ((0, 1), (0, 2), (1, 0), (2, 0))
    assert pairs_of(plan_of([(0, 1)], [1, 1], 4, devices=[(0, 1), (0,)])) == ((0, 1), (1, 0))
    chain = plan_of([(0, 1), (1, 2)], [1, 1, 1], 4, data=True)
    assert pairs_of(chain) == ((0, 1), (0, 2), (1, 0), (1, 2), (2, 1))  # data go from 0 to 2, and no gradients back


def _tensors() -> list[Tensor]:
    whole = torch.arange(12).view(3, 4)
    kinds = [(whole % 2 if name == "bool" else whole).to(dtype) for name, dtype in DTYPES.items()]
    return [*kinds, torch.tensor(3.5), torch.tensor(1j), torch.empty(0, 5), whole.double().t(), whole[:, 1:3]]


def _exchange(rank: int, own_groups: bool, pairs: list[tuple[int, int]]) -> list[Tensor]:
    """Everything at once in both directions, pipeline 1 beside pipeline 0; sends are waited for last."""
    mesh = Mesh(2, 2, rank)
    before = len(mesh._groups)
    transport = DistributedTransport(mesh, pairs, own_groups=own_groups)
    assert len(mesh._groups) - before == own_groups * 2 * len(pairs)
    return _exchanged(mesh, transport)


def _exchanged(mesh: Mesh, transport: DistributedTransport) -> list[Tensor]:
    buffers = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in _tensors()]
    receives = [transport.receive(buffer, 1 - mesh.device) for buffer in buffers]
    sends = [transport.send(tensor, 1 - mesh.device) for tensor in _tensors()]
    for work in [*receives, *sends]:
        work.wait()
        assert work.is_completed()
    return [_raw(buffer) for buffer in buffers]


def _raw(tensor: Tensor) -> Tensor:
    """Its bytes: pickle reads no tensors of some types."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _exchange_among_members(rank: int, own_groups: bool) -> list[Tensor]:
    mesh = Mesh(2, 1, rank, members=2)
    return _exchanged(mesh, DistributedTransport(mesh, [(0, 1), (1, 0)], own_groups=own_groups))


def check(received: list[Tensor]) -> None:
    for tensor, expected in zip(received, _tensors(), strict=True):
        assert torch.equal(tensor, _raw(expected))


def test_every_member_receives_once() -> None:
    """Over one group, and over a group for each pair."""
    for by_rank in run_each(4, _exchange_among_members, [(False,), (True,)]):
        for received in by_rank:
            check(received)


def test_every_kind_of_tensor_arrives_in_order() -> None:
    """Over one group, over a group for each pair, and for a pair without a group."""
    both = [(0, 1), (1, 0)]
    for by_rank in run_each(4, _exchange, [(False, both), (True, both), (True, [(0, 1)])]):
        for received in by_rank:
            check(received)


def _group_beside_nccl(rank: int) -> tuple[int, Any]:
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = device = torch.device("cpu", 0)
    groups = Mesh(2, 1, rank).groups("apart", [(0,)], "gloo")
    return len(groups), dist.group.WORLD.bound_device_id == device


def test_groups_over_gloo_have_nothing_to_do_with_the_device_of_the_default_group() -> None:
    """Torch would let rank 1 wait for rank 0 to split a communicator of NCCL; of a CPU it refuses to make a group."""
    assert run_distributed(2, _group_beside_nccl) == [(1, True), (0, True)]
