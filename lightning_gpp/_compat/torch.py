"""Private names of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
import torch.cuda.memory as _memory
import torch.utils.checkpoint as _checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # torch.export stands on it; no public name yet
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.distributed import distributed_c10d as _c10d
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

pytree: Final = _pytree
"""Maps functions over nested containers of tensors, with the containers that users have registered."""

BatchNorm: Final = _BatchNorm
"""Base class of all batch norms, which have no public one in common."""

FLASH_ATTENTION_FOR_CPU: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The attention of CPUs, which torch's own table of FLOPs lacks."""

COMPILED_IN_PLACE: Final = "_compiled_call_impl"

_DYNAMO: Final = str(Path(torch.__file__).parent / "_dynamo")

# --- tensors and modules


class _Unremembering(FakeTensorConverter):
    """Keeps no reference to results of calls."""

    def from_meta_and_device(
        self,
        fake_mode: FakeTensorMode,
        t: Tensor,
        device: torch.device,
        pytype: type[Tensor] | None = None,
        dispatch_keys: torch.DispatchKeySet | None = None,
    ) -> FakeTensor:
        return FakeTensor(fake_mode, t, device, pytype=pytype, dispatch_keys=dispatch_keys)


def fake_mode() -> FakeTensorMode:
    """A mode for fake tensors in which a call gives the same, whether torch has seen such a call before or not.

    Of the first call of a kind, torch would keep a weak reference to the result. A module with such a parameter cannot
    be converted (`module.to(dtype)`), because its content is swapped.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = _Unremembering()
    return mode


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """A contiguous fake tensor or parameter with the sizes of another one, made faster than by calls in the mode."""
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, meta, device)
    if isinstance(tensor, nn.Parameter):
        fake.requires_grad_(tensor.requires_grad)._is_param = True
    return fake


def wrapper(kind: type, outline: Tensor, device: torch.device) -> Any:
    """A tensor of a subclass, without memory, that has the sizes of `outline` and seems to be on a device."""
    make = Tensor._make_wrapper_subclass
    return make(kind, outline.shape, strides=outline.stride(), dtype=outline.dtype, device=device)


def schema_arguments(operator: Any) -> Sequence[Any]:
    """The arguments of an operator by its schema: `name`, and `alias_info` if they are changed."""
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside, functions of torch do not call `__torch_function__` of tensors' classes."""


def version(tensor: Tensor) -> int:
    """The number of in-place changes of a tensor; 0 for tensors made in inference mode, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def storage_id(tensor: Tensor) -> int:
    """Identity of the memory a tensor is in, for fake tensors, too, as long as some tensor uses it."""
    return int(tensor.untyped_storage()._cdata)


CHILDREN: Final = "_modules"
"""The attribute in which a module keeps its parts."""


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The dictionary of a module's own buffers, for writing; a scripted module keeps them elsewhere."""
    return {} if isinstance(module, torch.jit.ScriptModule) else module._buffers


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The dictionary of a module's own parameters, for writing; a scripted module keeps them elsewhere."""
    return {} if isinstance(module, torch.jit.ScriptModule) else module._parameters


HookTables = tuple[dict[int, Any], ...]
"""Hooks of a module by number, then the flags that they were registered with."""


def hook_tables(module: nn.Module) -> HookTables:
    """The tables of a module's hooks around its forward, for writing."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )


def has_backward_hooks(module: nn.Module) -> bool:
    """True if a module has hooks around its backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def forget_division(module: nn.Module) -> None:
    """Let `parallelize_module` divide a module again, which it does only once."""
    vars(module).pop("_distribute_module_applied", None)


@contextmanager
def imitated_processes(count: int) -> Iterator[None]:
    """Inside, this is the first of some processes, whose communication does nothing: for code that divides shapes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def without_splits() -> Iterator[None]:
    """Inside, new process groups are not split off from the default group.

    If NCCL's default group is bound to a device, torch lets the processes outside of a new group take part in a split
    of NCCL's communicator, whatever the backend of the group. Those inside of a gloo group do not, so the others would
    wait for them for ever, or pair with a later split. (github.com/pytorch/pytorch/issues/145376)
    """
    world = torch.distributed.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


_default_group = ContextVar[Any]("default_group", default=None)


class _WorldOfThread(_c10d._World):
    """The state of torch.distributed, with a default group that one thread may have for itself."""

    @property
    def default_pg(self) -> Any:
        group = _default_group.get()
        return self._default_pg if group is None else group

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        self._default_pg = value


class DefaultGroup(AbstractContextManager[None]):
    """Inside, `torch.distributed` uses a group where none is given; other threads go on as before.

    Args:
        group: the group.
        entered: the groups of contexts that are entered, the innermost last, of all threads.
    """

    def __init__(self, group: Any, entered: list[Any] | None = None) -> None:
        self._group, self._entered = group, [] if entered is None else entered
        self._tokens: list[Any] = []

    def __enter__(self) -> None:
        _c10d._world.__class__ = _WorldOfThread
        self._tokens.append(_default_group.set(self._group))
        self._entered.append(self._group)

    def __exit__(self, *raised: object) -> None:
        self._entered.pop()
        _default_group.reset(self._tokens.pop())


# --- autograd


def kept_version_counters(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Hide in-place changes of the tensors from autograd, which refuses a backward after them. Made for fully_shard."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def run_backward(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor | GradientEdge] = ()
) -> None:
    """`torch.autograd.backward` without its checks, which take longer than the backward of a small stage.

    The engine checks again, and sums a gradient over the dimensions in which its operand was broadcast.

    Args:
        roots: the edges at which the backward starts.
        gradients: one for each root.
        inputs: the tensors and edges that get a gradient; by default all that can be reached.
    """
    _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True
    )


as_result: Final = torch.ops.aten._unsafe_view.default
"""`as_result(leaf, leaf.shape)` is the same memory as the result of an operator, which may be changed in place, unlike
a leaf and views of it.
"""


def accumulator_of(leaf: Tensor) -> Node:
    """The node of an autograd graph that adds to the gradient of a leaf; keep it, as torch does not."""
    function = leaf.view_as(leaf).grad_fn
    assert function is not None
    node = function.next_functions[0][0]
    assert node is not None
    return node


def will_run(node: Node) -> bool:
    """Inside a backward: True if it comes to a node, False if it was asked for other gradients only."""
    return bool(torch._C._will_engine_execute_node(node))


def with_gradient_hooks(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of the tensors that have such hooks; quick, for a look in every step."""
    with without_torch_function():
        return [each for each in tensors if each._backward_hooks or each._post_accumulate_grad_hooks]


def trained_flags(parameters: Iterable[Tensor]) -> bytes:
    """A byte per parameter: 1 if it requires a gradient, otherwise 0; quick for foreign ones, too."""
    with without_torch_function():
        return bytes(map(_REQUIRES_GRAD, parameters))


_REQUIRES_GRAD: Final = attrgetter("requires_grad")


def graph_is_kept() -> bool:
    """Inside a backward: True if another backward of the same graph may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def check_gradients_by(
    scaler: torch.amp.GradScaler, agree: Callable[[dict[torch.device, Tensor]], dict[torch.device, Tensor]]
) -> None:
    """Let a scaler replace what it found in an optimizer's gradients, by device, by the result of `agree`."""
    plain = type(scaler)._unscale_grads_

    def found(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        return agree(plain(scaler, *args, **kwargs))

    vars(scaler)["_unscale_grads_"] = found


def check_gradients_plainly(scaler: torch.amp.GradScaler) -> None:
    """Undo `check_gradients_by`."""
    vars(scaler).pop("_unscale_grads_", None)


def saved(node: Node, name: str) -> Any:
    """The value that a node of an autograd graph saved under a name, unpacked; AttributeError if it has none."""
    return getattr(node, f"_saved_{name}")


def saved_unread(node: Node, name: str) -> Any:
    """The same without unpacking: the tensor, None, or what a `saved_tensors_hooks` packed."""
    return getattr(node, f"_raw_saved_{name}").data


@contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Inside, no `saved_tensors_hooks` are in force; of those outside there may be one pair."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def saves_tensors(node: Node) -> bool:
    """True if a node of torch's own saved tensors of the forward."""
    return any(name.startswith("_raw_saved") for name in dir(node))


# --- recorded calls


@contextmanager
def checkpoint_regions(enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
    """Announce every activation-checkpointed region; inside the context regions run without checkpointing."""
    plain = (_checkpoint.CheckpointFunction, _checkpoint._checkpoint_without_reentrant_generator)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            enter()
            try:
                return function(*args)
            finally:
                leave()

    def non_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        enter()
        try:
            yield
        finally:
            leave()

    _checkpoint.CheckpointFunction = Reentrant  # type: ignore[misc, assignment]
    _checkpoint._checkpoint_without_reentrant_generator = non_reentrant
    try:
        yield
    finally:
        _checkpoint.CheckpointFunction, _checkpoint._checkpoint_without_reentrant_generator = plain  # type: ignore[misc]


@contextmanager
def autograd_function_calls(handler: Callable[..., Any]) -> Iterator[None]:
    """Route `SomeFunction.apply(...)` of custom autograd functions to `handler(cls, plain_apply, args, kwargs)`."""
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return handler(cls, plain.__get__(None, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]


# --- compiled functions and modules


def uncompiled(function: Any) -> Any:
    """The function that `torch.compile` was given, if it made this one; otherwise the function itself."""
    while _file_of(function).startswith(_DYNAMO) and hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    is_torchs = _file_of(function).endswith("external_utils.py")  # one of torch's around those of torch.nn
    return function.__wrapped__ if is_torchs else function


def _file_of(function: Any) -> str:
    """The file of a function's code: wrappers of users have the attributes of what they wrap, but not its code."""
    return function.__code__.co_filename if isinstance(function, FunctionType) else ""


def wraps_compiled(module: torch.nn.Module) -> bool:
    """True if `torch.compile(module)` returned this module. torch itself copies such modules correctly."""
    from torch._dynamo import OptimizedModule  # takes a second to load, and is loaded already if there is one

    return isinstance(module, OptimizedModule)


def replace_calls(modules: Iterable[nn.Module], calls: Iterable[Callable[..., Any] | None]) -> list[Any]:
    """Let calls of modules run something else, None for their forward; returns what they ran, as after `compile()`."""
    before = []
    for module, call in zip(modules, calls, strict=True):
        before.append(vars(module).pop(COMPILED_IN_PLACE, None))
        if call is not None:
            vars(module)[COMPILED_IN_PLACE] = call
    return before


# --- captures of CUDA graphs


def leave_pool(device: torch.device, pool: Any) -> None:
    """Do what a capture into a pool leaves undone if its end fails: until then torch takes it for under way, keeps
    memory that other streams have used, and refuses further captures into the pool.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # which says that the capture failed later, and has left the pool
        _memory._cuda_endAllocateToPool(index, pool)  # type: ignore[attr-defined]
        _memory._cuda_releasePool(index, pool)  # type: ignore[attr-defined]


# --- process groups


def default_store() -> Any:
    """The store through which the default process group was made."""
    return _c10d._get_default_store()


ASSERTED = "_is_all_true"
"""The operator by which torch reads the condition of an assertion on a tensor (`torch._check_tensor_all`). It holds in
recordings, and is not looked at where a forward is cut.
"""
