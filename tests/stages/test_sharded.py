"""A captured stage reads the parameters that are in the user's modules when it runs: sharded ones, once gathered."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from lightning_gpp.capture import capture_step
from lightning_gpp.runtime import Mesh
from lightning_gpp.runtime.sharding import ShardedStages
from lightning_gpp.stages import build
from tests.capture import zoo
from tests.distributed import run_distributed
from tests.stages.inprocess import chain_of, split_gradients, whole_gradients

CHOSEN = zoo.WORKING[::4]
WORST = dict[str, tuple[float, int]]
"""For every kind of model the largest relative error of a gradient, and the number of parameters that were cut."""


def _sharded(rank: int) -> WORST:
    mesh = Mesh(2, 1, rank)
    return {kind.__name__: _error(kind, mesh) for kind in CHOSEN}


def _error(kind: type[zoo.Base], mesh: Mesh) -> tuple[float, int]:
    torch.manual_seed(1)
    module = kind().double()
    for owner in module.modules():
        if hasattr(owner, "log_dict"):
            vars(owner)["log"] = lambda *_, **__: None
    captured = capture_step(module, zoo.batch())
    plan = chain_of(captured, kind.stages, 3)
    loss, reference = whole_gradients(module, plan, zoo.batch())
    parameters = dict(module.named_parameters())
    used = build(captured, plan, module).parameters
    stages = {name: [stage for stage, names in enumerate(used) if name in names] for name in parameters}
    holders = {name: (0, 1) if len(stages[name]) == 1 else (mesh.rank,) for name in parameters}
    holders = {name: ranks for name, ranks in holders.items() if len(ranks) == 2}  # tied ones are left out
    mine = {name: parameters[name] for name in holders}
    sharding = ShardedStages(module, mine, holders, mesh, stages=stages)
    pipeline = build(captured, plan, module)  # from the shards
    for stage in range(len(plan.stages)):
        sharding.ready(stage)
    ours = split_gradients(module, pipeline, plan, zoo.batch())
    assert ours == pytest.approx(loss, rel=1e-12)
    for stage in range(len(plan.stages)):
        sharding.reduce(stage)
        sharding.reshard(stage)
    sharding.sync()
    worst = 0.0
    for name in sharding.sharded:
        shard, theirs = module.get_parameter(name), reference.get_parameter(name).grad
        assert isinstance(shard, DTensor)
        if theirs is None or shard.grad is None:
            assert theirs is shard.grad is None, name
        else:
            scale = max(theirs.abs().max().item(), 1e-3)
            worst = max(worst, (shard.grad.full_tensor() - 2 * theirs).abs().max().item() / scale)
    return worst, len(sharding.sharded)


def test_captured_stages_see_gathered_parameters() -> None:
    for result in run_distributed(2, _sharded):
        assert len(result) == len(CHOSEN)
        assert {name: error for name, (error, _) in result.items() if error > 1e-12} == {}
        assert sum(count == 0 for _, count in result.values()) == 0
