"""Every private name of torch does what the library needs of it: an upgrade that breaks one fails here first."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.flop_counter import flop_registry

from lightning_gpp._compat.torch import (
    CHILDREN,
    COMPILED_IN_PLACE,
    FLASH_ATTENTION_FOR_CPU,
    BatchNorm,
    DefaultGroup,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    buffers_of,
    default_store,
    fake_like,
    fake_mode,
    forget_division,
    has_backward_hooks,
    hook_tables,
    imitated_processes,
    leave_pool,
    parameters_of,
    pytree,
    replace_calls,
    schema_arguments,
    storage_id,
    uncompiled,
    unset_fake_temporarily,
    version,
    without_splits,
    without_torch_function,
    wrapper,
    wraps_compiled,
)


class Operators(TorchDispatchMode):
    """Collects the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


class Pair(NamedTuple):
    first: Any
    second: Any


class Hollow(Tensor):
    """A tensor without memory that notes which functions and operators reach it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.overloadpacket.__name__)
        return args[0]


class Loud(Tensor):
    """A tensor that no function may touch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a function of torch was called")


@pytest.mark.parametrize("original", [nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3, dtype=torch.int32)])
def test_fake_like(original: Tensor) -> None:
    made = fake_like(original, fake_mode(), torch.device("cuda"))
    assert type(made) is FakeTensor
    assert isinstance(made, nn.Parameter) is isinstance(original, nn.Parameter)
    assert (made.requires_grad, made.is_leaf) == (original.requires_grad, True)
    assert (made.shape, made.dtype, made.device.type) == (original.shape, original.dtype, "cuda")


def test_without_torch_function() -> None:
    loud = torch.ones(2).as_subclass(Loud)
    with without_torch_function():
        assert torch.add(loud, 1).tolist() == [2, 2]


def test_schema_arguments() -> None:
    arguments = schema_arguments(torch.ops.aten.add_.Tensor)
    assert [argument.name for argument in arguments] == ["self", "other", "alpha"]
    assert [argument.alias_info is not None for argument in arguments] == [True, False, False]


def test_unset_fake_temporarily() -> None:
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        with unset_fake_temporarily():
            assert torch.ones(2).tolist() == [1, 1]
        assert isinstance(torch.ones(2), FakeTensor)


def test_wrapper() -> None:
    hollow = wrapper(Hollow, torch.empty(2, 3, dtype=torch.float64, device="meta"), torch.device("cpu"))
    assert (type(hollow), hollow.shape, hollow.stride(), hollow.dtype) == (Hollow, (2, 3), (3, 1), torch.float64)
    assert hollow.device == torch.device("cpu")
    assert hollow.mul_(2) is hollow
    assert Hollow.seen == ["mul_"]


# --- names


def test_pytree() -> None:
    tree = {"a": [torch.ones(1), 2], "b": Pair(3, (4,))}
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == pytree.tree_leaves(tree)
    assert leaves[1:] == [2, 3, 4]
    assert pytree.tree_unflatten(leaves, spec)["b"] == Pair(3, (4,))
    assert pytree.tree_map(str, {"a": [1], "b": Pair(3, None)}) == {"a": ["1"], "b": Pair("3", "None")}
    assert pytree.tree_map_only(int, lambda number: -number, ["x", 1]) == ["x", -1]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d])
def test_batch_norm(norm: type[nn.Module]) -> None:
    assert issubclass(norm, BatchNorm)
    assert not issubclass(nn.LayerNorm, BatchNorm)


def test_flash_attention_for_cpu() -> None:
    query = torch.randn(1, 1, 4, 8)
    with Operators() as operators:
        nn.functional.scaled_dot_product_attention(query, query, query)
    assert FLASH_ATTENTION_FOR_CPU in operators.seen
    assert FLASH_ATTENTION_FOR_CPU not in flop_registry, "torch counts it now: the entry can go"


def test_fake_tensor_mode() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        huge = torch.empty(1 << 40) + torch.ones(1)
    assert huge.shape == (1 << 40,)


def test_fake_mode() -> None:
    for _ in range(2):  # torch has seen the calls of the second round
        with fake_mode():
            layer = nn.Linear(3, 5)
            layer.bias = nn.Parameter(torch.empty(5).unflatten(0, (5, 1))[:, 0].detach())
            layer.to(torch.float64)
        assert layer.weight.dtype == layer.bias.dtype == torch.float64


def test_fake_tensor() -> None:
    with FakeTensorMode():
        assert isinstance(torch.empty(1), FakeTensor)
    assert not isinstance(torch.empty(1), FakeTensor)


def test_torch_dispatch_mode() -> None:
    with Operators() as operators:
        torch.ones(2).sum()
    assert operators.seen == [torch.ops.aten.ones, torch.ops.aten.sum]


# --- tensors and modules


def test_version() -> None:
    tensor = torch.zeros(2)
    before = version(tensor)
    tensor[0].add_(1)
    assert version(tensor) == before + 1
    with torch.inference_mode():
        assert version(torch.zeros(2).add_(1)) == 0


def test_storage_id() -> None:
    with FakeTensorMode():
        for tensor in (torch.zeros(4), torch.zeros(4, device="meta")):
            assert storage_id(tensor[1:]) == storage_id(tensor) != storage_id(tensor.clone())


def test_children() -> None:
    assert vars(nn.Sequential(nn.ReLU()))[CHILDREN].keys() == {"0"}


def test_buffers_of() -> None:
    norm = nn.BatchNorm1d(2)
    buffers_of(norm)["running_mean"] = torch.ones(2)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [1, 1]
    assert buffers_of(nn.Sequential(norm)) == {}


# --- compiled functions and modules


def test_compiled_in_place() -> None:
    """Calls of a module go through the attribute; without it they are those of its class."""
    module = nn.ReLU()
    module.compile(backend="eager")
    assert vars(module)[COMPILED_IN_PLACE] is not None
    vars(module)[COMPILED_IN_PLACE] = lambda x: "answered"
    assert module(torch.zeros(1)) == "answered"
    del vars(module)[COMPILED_IN_PLACE]
    assert module(torch.zeros(1)) == torch.zeros(1)


def test_uncompiled() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    assert uncompiled(function) is function
    compiled = torch.compile(function, backend="eager")
    assert uncompiled(compiled) is function
    wrapper = functools.wraps(compiled)(lambda x: compiled(x))
    assert uncompiled(wrapper) is wrapper
    assert uncompiled(torch.compile(nn.functional.gelu, backend="eager")) is nn.functional.gelu
    assert uncompiled(None) is None


def compiled_modules() -> list[nn.Module]:
    in_place, replaced = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    replaced.forward = torch.compile(replaced.forward, backend="eager")  # type: ignore[method-assign]
    return [in_place, replaced, torch.compile(nn.Linear(1, 1), backend="eager")]  # type: ignore[list-item]


def test_wraps_compiled() -> None:
    assert [wraps_compiled(module) for module in compiled_modules()] == [False, False, True]


def test_replace_calls() -> None:
    module, x = nn.Linear(1, 1), torch.ones(1, 1)
    module.compile(backend="eager")
    compiled, expected = module._compiled_call_impl, module.forward(x)
    assert replace_calls([module], [lambda *args: "answer"]) == [compiled]
    assert module(x) == "answer"
    assert torch.equal(copy.deepcopy(module)(x), expected)
    assert replace_calls([module], [None])[0]() == "answer"
    assert torch.equal(module(x), expected)
    assert replace_calls([module], [compiled]) == [None]


def test_parameters_of() -> None:
    module = nn.Linear(1, 1)
    part = module.weight * 2
    parameters_of(module)["weight"] = part
    assert module.weight is part


def test_hook_tables() -> None:
    module, found = nn.Linear(1, 1), list[str]()
    handles = [
        module.register_forward_pre_hook(lambda *_: found.append("before")),
        module.register_forward_hook(lambda *_, **__: found.append("after"), with_kwargs=True, always_call=True),
    ]
    tables = hook_tables(module)
    assert [list(table) for table in tables] == [[handles[0].id], [handles[1].id], [], [handles[1].id], [handles[1].id]]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    module(torch.ones(1))
    assert found == []
    for table, entries in zip(tables, kept, strict=True):
        table.update(entries)
    module(torch.ones(1))
    assert found == ["before", "after"]


def test_has_backward_hooks() -> None:
    for register in (nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook):
        module = nn.Linear(1, 1)
        assert not has_backward_hooks(module)
        handle = register(module, lambda *_: None)
        assert has_backward_hooks(module)
        handle.remove()
        assert not has_backward_hooks(module)


def test_leave_pool_calls_what_torch_calls() -> None:
    source = inspect.getsource(torch.cuda.use_mem_pool)
    for name in ("_cuda_endAllocateToPool(device_index, pool.id)", "_cuda_releasePool(device_index, pool.id)"):
        assert name in source


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_leave_pool() -> None:
    device, pool = torch.device("cuda", 0), torch.cuda.graph_pool_handle()
    value = torch.ones(1, device=device)
    failed, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        failed.capture_begin(pool=pool)
        with pytest.raises(RuntimeError):
            value.item()
        with pytest.raises(RuntimeError):
            failed.capture_end()
    leave_pool(device, pool)
    leave_pool(device, pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=stream):
        value.add_(1)
    assert float(value + torch.rand(1, device=device).ge(2)) == 1


def test_without_splits() -> None:
    """A device that a group is bound to is asked about splits, which that of a CPU refuses."""
    with imitated_processes(2):
        world, device = torch.distributed.group.WORLD, torch.device("cpu", 0)
        assert world is not None
        world.bound_device_id = device
        with pytest.raises(ValueError, match="device_id"):
            torch.distributed.new_group([0, 1], backend="fake")
        with without_splits():
            torch.distributed.new_group([0, 1], backend="fake")
        assert world.bound_device_id == device


def test_imitated_processes() -> None:
    with imitated_processes(3):
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 3)
        torch.distributed.all_reduce(torch.ones(2))
    assert not torch.distributed.is_initialized()


def test_forget_division() -> None:
    module = nn.Linear(2, 2)
    with imitated_processes(2):
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(module, mesh, ColwiseParallel())
        with pytest.raises(RuntimeError, match="called once"):
            parallelize_module(module, mesh, ColwiseParallel())
        forget_division(module)
        parallelize_module(module, mesh, ColwiseParallel())


def test_a_default_group_of_one_thread(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        everyone, other, seen = dist.group.WORLD, dist.new_group([0]), list[Any]()
        with DefaultGroup(other):
            thread = threading.Thread(target=lambda: seen.append(dist.group.WORLD))
            thread.start()
            thread.join()
            assert dist.group.WORLD is other
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert seen == [everyone] == [dist.group.WORLD]
    finally:
        dist.destroy_process_group()


def test_default_store(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        default_store().set("key", "value")
        assert default_store().clone().get("key") == b"value"
    finally:
        dist.destroy_process_group()
