"""Every private name of torch does what the library needs of it: an upgrade that breaks one fails here first."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from lightning_gpp._compat.torch import (
    CHILDREN,
    FLASH_ATTENTION_FOR_CPU,
    BatchNorm,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    accumulator_of,
    autograd_function_calls,
    buffers_of,
    check_gradients_by,
    check_gradients_plainly,
    checkpoint_regions,
    default_group,
    default_store,
    fake_mode,
    forget_division,
    graph_is_kept,
    hand_over_gradient_hooks,
    hook_tables,
    hooks_of,
    imitated_processes,
    kept_version_counters,
    parameters_of,
    pytree,
    replace_call,
    run_backward,
    saved,
    saved_unread,
    saves_tensors,
    schema_arguments,
    storage_id,
    uncompiled,
    unset_fake_temporarily,
    version,
    will_run,
    with_gradient_hooks,
    without_saved_hooks,
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


# --- autograd


class Asked(torch.autograd.Function):
    """Notes facts about the backward that comes to it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, node: Any, facts: list[tuple[bool, bool]]) -> Tensor:
        ctx.node, ctx.facts = node, facts
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.facts.append((will_run(ctx.node), graph_is_kept()))
        return None, gradient, None, None


def facts_of_backwards() -> list[tuple[bool, bool]]:
    facts: list[tuple[bool, bool]] = []
    token, x = torch.zeros((), requires_grad=True), torch.ones(2, requires_grad=True)
    result = Asked.apply(token, x, accumulator_of(token), facts).sum()  # type: ignore[no-untyped-call]
    result.backward(retain_graph=True)
    torch.autograd.grad(result, x)
    return facts


def test_accumulator_of() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    assert accumulator_of(leaf).name().endswith("AccumulateGrad")
    assert accumulator_of(leaf) is (leaf * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def test_will_run() -> None:
    assert [wanted for wanted, _ in facts_of_backwards()] == [True, False]


def test_graph_is_kept() -> None:
    assert [kept for _, kept in facts_of_backwards()] == [True, False]


def scaled_step(agree: Callable[[Any], Any]) -> tuple[torch.amp.GradScaler, Tensor]:
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=8.0), torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    check_gradients_by(scaler, agree)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler, weight.detach()


def hooked(seen: list[Any]) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(seen.append)
    parameter.register_post_accumulate_grad_hook(seen.append)
    return parameter


def test_with_gradient_hooks() -> None:
    plain, parameter = nn.Parameter(torch.ones(2)), hooked([])
    assert [id(each) for each in with_gradient_hooks([plain, parameter])] == [id(parameter)]


def test_hand_over_gradient_hooks() -> None:
    seen: list[Any] = []
    before, after = hooked(seen), nn.Parameter(torch.ones(2))
    handle = before.register_hook(seen.append)
    hand_over_gradient_hooks(before, after)
    handle.remove()
    after.sum().backward()
    assert len(seen) == 2
    assert seen[1] is after


def test_check_gradients_by() -> None:
    scaler, weight = scaled_step(lambda found: {torch.device("cpu"): torch.ones(1)})
    assert (scaler.get_scale(), weight.tolist()) == (4.0, [1, 1]), "another rank found one that is not finite"


def test_check_gradients_plainly() -> None:
    scaler, weight = scaled_step(lambda found: found)
    assert weight.tolist() == [0.5, 0.5]
    check_gradients_plainly(scaler)
    assert "_unscale_grads_" not in vars(scaler)


def test_run_backward() -> None:
    x, weight = torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)
    out = x * weight
    run_backward([get_gradient_edge(out)], [torch.ones(3, 2)], [weight])
    assert x.grad is None
    assert weight.grad is not None
    assert torch.equal(weight.grad, x.detach().sum(0))
    run_backward([get_gradient_edge(x + weight)], [torch.ones(3, 2)])
    assert torch.equal(weight.grad, x.detach().sum(0) + 3), "accumulated, and summed over the broadcast dimension"


def test_run_backward_reaches_edges() -> None:
    x = torch.randn(2, requires_grad=True)
    middle = x * 2
    arrived: list[Tensor] = []
    edge = get_gradient_edge(middle)
    edge.node.register_prehook(lambda gradients: arrived.append(gradients[0]))
    run_backward([get_gradient_edge(middle * 3)], [torch.ones(2)], [GradientEdge(edge.node, 0)])
    assert x.grad is None
    assert [gradient.tolist() for gradient in arrived] == [[3, 3]]


def product() -> tuple[Tensor, Tensor, Any]:
    first, second = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    return first, second, torch.addmm(torch.zeros(4), first, second.t()).grad_fn


def test_saved() -> None:
    first, second, node = product()
    assert torch.equal(saved(node, "mat1"), first)
    assert torch.equal(saved(node, "mat2"), second.t())
    assert saved(node, "alpha") == saved(node, "beta") == 1
    assert saved(node, "mat2_sym_sizes") == (3, 4)
    assert saved(node, "mat2_sym_strides") == (1, 3)
    with pytest.raises(AttributeError):
        saved(node, "mat3")


def test_saved_of_convolutions() -> None:
    image, convolution = torch.randn(1, 2, 5, requires_grad=True), nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2)
    node = convolution(image).grad_fn
    names = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    settings = [saved(node, name) for name in names]
    gradient = torch.randn_like(convolution(image))
    operands = (saved(node, "input"), saved(node, "weight"))
    every = torch.ops.aten.convolution_backward(gradient, *operands, *settings, [False, True, False])
    convolution(image).backward(gradient)
    assert torch.equal(every[1], convolution.weight.grad)


def test_without_saved_hooks() -> None:
    packed: list[torch.Size] = []

    def forward() -> None:
        torch.ones(2, requires_grad=True).exp()

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor.shape), lambda _: torch.ones(2)):
        with without_saved_hooks():
            forward()
        assert not packed
        forward()
    assert packed == [(2,)]


def test_saved_unread() -> None:
    first, _, node = product()
    assert torch.equal(saved_unread(node, "mat1"), first)
    with saved_tensors_hooks(lambda tensor: "packed", lambda packed: first):
        _, _, node = product()
    assert saved_unread(node, "mat1") == "packed"
    frozen = torch.addmm(torch.zeros(4), first, torch.randn(3, 4)).grad_fn
    assert saved_unread(frozen, "mat1") is None


def test_saves_tensors() -> None:
    first, _, node = product()
    assert saves_tensors(node)
    assert not saves_tensors((first + 1).grad_fn)


# --- recorded calls


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_regions(use_reentrant: bool) -> None:
    events: list[str] = []

    def region(x: Tensor) -> Tensor:
        events.append("run")
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    with checkpoint_regions(lambda: events.append("enter"), lambda: events.append("leave")):
        checkpoint(region, x, use_reentrant=use_reentrant).backward()
    assert events == ["enter", "run", "leave"], "without checkpointing nothing runs again"
    checkpoint(region, x, use_reentrant=use_reentrant).backward()
    assert events == ["enter", "run", "leave", "run", "run"]


def test_autograd_function_calls() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    calls: list[type] = []

    def handler(cls: type, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        calls.append(cls)
        return apply(*args, **kwargs)

    with autograd_function_calls(handler):
        assert Double.apply(torch.ones(1)).item() == 2
    Double.apply(torch.ones(1))
    assert calls == [Double]


# --- compiled functions and modules


def test_uncompiled() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    assert uncompiled(function) is function
    assert uncompiled(torch.compile(function, backend="eager")) is function
    assert uncompiled(torch.compile(nn.functional.gelu, backend="eager")) is nn.functional.gelu
    assert uncompiled(None) is None


def compiled_modules() -> list[nn.Module]:
    in_place, replaced = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    replaced.forward = torch.compile(replaced.forward, backend="eager")  # type: ignore[method-assign]
    return [in_place, replaced, torch.compile(nn.Linear(1, 1), backend="eager")]  # type: ignore[list-item]


def test_wraps_compiled() -> None:
    assert [wraps_compiled(module) for module in compiled_modules()] == [False, False, True]


def test_replace_call() -> None:
    module, x = nn.Linear(1, 1), torch.ones(1, 1)
    module.compile(backend="eager")
    compiled, expected = module._compiled_call_impl, module.forward(x)
    assert replace_call(module, lambda *args: "answer") is compiled
    assert module(x) == "answer"
    assert torch.equal(copy.deepcopy(module)(x), expected)
    assert replace_call(module, None)() == "answer"
    assert torch.equal(module(x), expected)
    assert replace_call(module, compiled) is None


def test_kept_version_counters() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    product = weight * weight
    with kept_version_counters([weight]), torch.no_grad():
        weight.add_(1.0)
    product.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 6.0  # of the new value: autograd did not notice
    product = weight * weight
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_parameters_of() -> None:
    module = nn.Linear(1, 1)
    part = module.weight * 2
    parameters_of(module)["weight"] = part
    assert module.weight is part


def test_hooks_of() -> None:
    module = nn.Linear(1, 1)
    hooks = [lambda *_, number=number: None for number in range(4)]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    module.register_full_backward_hook(hooks[2])
    module.register_full_backward_pre_hook(hooks[3])
    assert hooks_of(module) == hooks


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


def test_default_group(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        everyone, other, seen = dist.group.WORLD, dist.new_group([0]), list[Any]()
        with default_group(other):
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
