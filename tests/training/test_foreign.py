"""Parameters of other ranks: what they answer, what is left to the ranks that hold them, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp import ForeignTensorError
from lightning_gpp.training.runner import on_one_rank
from lightning_gpp.training.tensors.foreign import Foreign, Whereabouts, foreign_like, pickled_as

CPU = torch.device("cpu")
LEFT, RIGHT = Whereabouts("left.weight", "towers", frozenset({1})), Whereabouts("right.weight", "other", frozenset({2}))


def elsewhere(origin: Whereabouts = LEFT, *shape: int) -> Tensor:
    parameter = nn.Parameter(torch.ones(shape or (3, 2)))
    parameter.decays = True  # type: ignore[attr-defined]
    return foreign_like(parameter, CPU, [origin])


def linear() -> nn.Linear:
    module = nn.Linear(2, 3)
    module.weight = elsewhere()  # type: ignore[assignment]
    return module


def test_structure_is_that_of_the_real_parameter() -> None:
    parameter = elsewhere()
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.shape, parameter.dtype, parameter.device, parameter.numel()) == ((3, 2), torch.float32, CPU, 6)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.is_meta
    assert parameter.decays  # type: ignore[attr-defined]
    assert repr(parameter) == "foreign(shape=(3, 2), dtype=torch.float32, of 'left.weight' (stage 'towers', rank 1))"


def test_modules_and_optimizers_work_with_it() -> None:
    module = linear()
    assert next(module.parameters()).device == CPU
    assert module.state_dict()["weight"].shape == (3, 2)
    module.zero_grad()
    module.zero_grad(set_to_none=False)
    assert not module.requires_grad_(False).weight.requires_grad
    assert module.requires_grad_(True).to(torch.float64).weight.dtype == torch.float64
    torch.optim.AdamW(module.parameters()).zero_grad()
    module.apply(lambda part: None)
    copied = copy.deepcopy(module).weight
    assert isinstance(copied, Foreign)
    assert isinstance(copied, nn.Parameter)
    assert copied is not module.weight


@torch.no_grad()
def test_operations_of_foreign_tensors_are_left_to_their_rank() -> None:
    average, weight = elsewhere(), elsewhere()
    assert average.mul_(0.9) is average
    average.add_(weight, alpha=0.1)
    average.lerp_(weight, torch.tensor(0.1))
    average.data.copy_(weight.data * 0.1 + average.data * 0.9)
    average.copy_(torch.zeros(3, 2))  # a checkpoint, the same on all ranks
    torch._foreach_mul_([average, weight], 0.5)
    nn.init.xavier_uniform_(weight)
    assert nn.utils.clip_grad_norm_([average, weight], 1.0).shape == ()
    assert type(weight.norm()) is Foreign


HERE = nn.Parameter(torch.ones(3, 2))
HERE.grad = torch.ones(3, 2)
PLAIN = torch.ones(3, 2)

READING: list[Callable[[], Any]] = [
    lambda: elsewhere().norm().item(),
    lambda: float(elsewhere().sum()),
    lambda: elsewhere().detach().numpy(),
    lambda: bool((elsewhere() > 0).all()),
    lambda: torch.equal(elsewhere(), elsewhere()),
    lambda: elsewhere().nonzero(),
    lambda: elsewhere().data_ptr(),
    lambda: torch.save(elsewhere(), io.BytesIO()),
]
MIXING: list[Callable[[], Any]] = [
    lambda: PLAIN.add_(elsewhere()),
    lambda: HERE.data.lerp_(elsewhere().data, 0.1),
    lambda: elsewhere().copy_(HERE),
    lambda: HERE + elsewhere(),
    lambda: torch.cat([PLAIN, elsewhere()]),
    lambda: torch._foreach_add_([HERE], [elsewhere()]),
    lambda: PLAIN.__setitem__(0, elsewhere()[0]),
    lambda: nn.utils.clip_grad_norm_([HERE, elsewhere()], 1.0),
]


@pytest.mark.parametrize("operation", [*READING, *MIXING], ids=range(len(READING) + len(MIXING)))
@torch.no_grad()
def test_what_needs_the_values_is_refused(operation: Callable[[], Any]) -> None:
    with pytest.raises(ForeignTensorError, match=r"'left.weight' \(stage 'towers', rank 1\), which this rank does not"):
        operation()
    assert HERE.eq(1).all()
    assert PLAIN.eq(1).all()


@torch.no_grad()
def test_parameters_of_two_other_ranks_do_not_meet() -> None:
    with pytest.raises(ForeignTensorError, match=r"'left.weight' \(.*'right.weight' \(stage 'other', rank 2\)"):
        elsewhere().add_(elsewhere(RIGHT))


@torch.no_grad()
def test_code_of_one_rank_does_not_change_them() -> None:
    weight = elsewhere()
    with on_one_rank():
        linear().zero_grad()
        with pytest.raises(ForeignTensorError, match="`mul_`.*The step runs on this rank only"):
            weight.mul_(0.9)
        with pytest.raises(ForeignTensorError, match="`copy_`"):
            weight.copy_(torch.zeros(3, 2))
    weight.mul_(0.9)


def test_ranks_do_not_combine_different_tensors() -> None:
    """An operation in place on a foreign tensor alone is left to its rank, but not a collective."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(ForeignTensorError, match="`allreduce` needs values of 'left.weight'.*Leave the call out"):
            dist.all_reduce(elsewhere().grad)
    finally:
        dist.destroy_process_group()


def test_pickled_with_the_values_of_a_checkpoint() -> None:
    file, values = io.BytesIO(), {"left.weight": torch.full((3, 2), 7.0)}
    with pickled_as(values):
        torch.save(linear(), file)
    file.seek(0)
    assert torch.load(file, weights_only=False).weight.eq(7).all()
