"""Foreign tensors: the parameters and buffers of other ranks' stages, as they stand in this rank's module.

A foreign tensor has shape, dtype, device and attributes of the real one, and no values. Hooks run on every rank, each
on what the rank holds. So an operation that only has foreign operands is done by the rank that holds them, and here it
gives another foreign tensor:

    hook        for t, s in zip(teacher.parameters(), student.parameters()): t.mul_(0.9).add_(s, alpha=0.1)
    rank 1      holds both: computes
    rank 0      holds neither: nothing to do

Of gradients the norms are known in some hooks, before which ranks exchange them (`KnownNorms`):

    norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]     every rank: those of all stages

Whatever else would need its values here raises an error that names the tensor, and the door to its values
(`gathered.summon_full_params`): to read one, or to combine it with a tensor of this rank, except to change the foreign
one by it. In user code that only one rank runs, that does, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import pytree, without_torch_function, wrapper
from lightning_gpp.errors import ForeignTensorError
from lightning_gpp.runtime.named_tensors import attributes_of
from lightning_gpp.runtime.operands import changed_by
from lightning_gpp.training.control import Control
from lightning_gpp.wording import some

alone: ContextVar[bool] = ContextVar("alone", default=False)
"""True where user code runs that the other ranks do not run: they would not do what is left to them."""
_norms: ContextVar[KnownNorms | None] = ContextVar("norms", default=None)
"""The norms that are known in the present hook."""
_values: ContextVar[Mapping[str, Any] | None] = ContextVar("values", default=None)

_READS: Final = {
    *("item", "tolist", "numpy", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"),
}
_DEPENDS_ON_VALUES: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A parameter or buffer that is not here: its name, the stage that uses it, and the ranks that hold it."""

    name: str
    stage: str
    ranks: frozenset[int]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, sorted(self.ranks)))
        return f"{self.name!r} (stage {self.stage!r}, rank {ranks})"


class Foreign(Tensor):
    """A tensor whose values are on other ranks.

    Args:
        outline: a tensor of the same shape and dtype; its values are not kept.
        device: the device that it seems to be on.
        origins: the parameters and buffers that it is, or was computed from.
    """

    origins: tuple[Whereabouts, ...]
    gradient_of = ""
    """The parameter whose gradient it is; empty if it is something else."""
    from_gradient = False
    """True if it was computed from a gradient."""
    is_meta = property(lambda self: True)

    def __new__(cls, outline: Tensor, device: torch.device, origins: Sequence[Whereabouts]) -> Foreign:
        tensor: Foreign = wrapper(cls, outline, device)
        tensor.origins = tuple(dict.fromkeys(origins))
        return tensor

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that hold all of its origins."""
        return frozenset.intersection(*(origin.ranks for origin in self.origins))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        origins = ", ".join(map(str, self.origins[:3]))
        return f"foreign(shape={tuple(self.shape)}, dtype={self.dtype}, of {origins})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Foreign:
        copied = foreign_like(self, self.device, self.origins)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = (_values.get() or {}).get(self.origins[0].name)
        if not isinstance(value, Tensor) or value.is_meta or value.shape != self.shape:
            raise _refusal("pickle", [self])
        return (nn.Parameter(value, self.requires_grad) if _is_parameter(self) else value).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gradients are foreign, too; functions that would read memory outside of operators are refused here."""
        name, attribute = getattr(func, "__name__", str(func)), getattr(func, "__self__", None)
        if name in _READS:
            raise _refusal(name, args[:1])
        if name == "equal" and all(map(_is_parameter, args)) and not all(isinstance(each, Foreign) for each in args):
            return False  # callbacks look for a parameter among those of an optimizer, which are here
        if name == "__get__" and attribute is Tensor.grad:
            return _gradient_of(args[0])
        if name == "__set__" and attribute in (Tensor.grad, Tensor.data):
            return _set(func, *args)
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        return (_one_by_one if name.startswith("_foreach") else _answered)(func, name, args, kwargs)


def _answered(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of an operator, without values; the norm of a gradient, if it is known."""
    if name == "linalg_vector_norm" and (norm := _known_norm(args[0], args, kwargs)) is not None:
        return norm
    leaves, structure = pytree.tree_flatten((args, kwargs))
    foreign = [leaf for leaf in leaves if isinstance(leaf, Foreign)]
    written = changed_by(func, args, kwargs)
    if func.namespace == "c10d":
        raise _refusal(name.rstrip("_"), foreign, _IN_COLLECTIVE)
    if _DEPENDS_ON_VALUES & set(func.tags) or _is_left_undone(foreign, written, leaves):
        raise _refusal(name, foreign)
    _note_changes(written)
    device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), foreign[0].device)
    outlines = [_outline(leaf) for leaf in leaves]
    known = {id(outline): leaf for outline, leaf in zip(outlines, leaves, strict=True)}
    origins = [origin for tensor in foreign for origin in tensor.origins]
    from_gradient = any(tensor.gradient_of or tensor.from_gradient for tensor in foreign)

    def answer(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) in known:
            return known.get(id(leaf), leaf)
        made = Foreign(leaf, device, origins)
        made.from_gradient = from_gradient
        return made

    if torch.Tag.nondeterministic_seeded in func.tags:
        _draw(func, leaves, structure)
    given, named = pytree.tree_unflatten(outlines, structure)
    result = pytree.tree_map(answer, func(*given, **named))
    if name in ("detach", "alias"):
        result.gradient_of = foreign[0].gradient_of
    return result


def _draw(func: Any, leaves: Sequence[Any], structure: Any) -> None:
    """Draw the random numbers that an operator draws elsewhere: where ranks share a stream, it goes on alike."""
    made = [
        torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, Foreign) else leaf
        for leaf in leaves
    ]
    given, named = pytree.tree_unflatten(made, structure)
    func(*given, **named)


def foreign_like(tensor: Tensor, device: torch.device, origins: Sequence[Whereabouts]) -> Foreign:
    """A foreign tensor for a real, empty or foreign one; a parameter for a parameter, with its attributes."""
    foreign: Tensor = Foreign(tensor.detach(), device, origins)
    if _is_parameter(tensor):
        foreign = nn.Parameter(foreign, requires_grad=tensor.requires_grad)
    vars(foreign).update(attributes_of(tensor), origins=tuple(origins))
    return cast(Foreign, foreign)


@contextmanager
def pickled_as(values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, foreign tensors are pickled as the values with their names."""
    token = _values.set(values)
    try:
        yield
    finally:
        _values.reset(token)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _gradient_of(tensor: Foreign) -> Foreign | None:
    """A gradient is where its parameter is; whether there is one at the moment is known in some hooks."""
    name = tensor.origins[0].name
    if not tensor.requires_grad or (_norms.get() or {}).get(name, ()) is None:
        return None
    gradient = Foreign(tensor.detach(), tensor.device, tensor.origins)
    gradient.gradient_of = name if _is_parameter(tensor) else ""
    return gradient


def _known_norm(tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The norm of a gradient of another rank, if it is known."""
    order = _order_of(args, kwargs)
    norms = (_norms.get() or {}).get(tensor.gradient_of) if isinstance(tensor, Foreign) else None
    if norms is None or order not in ORDERS:
        return None
    return torch.tensor(norms[ORDERS.index(order)], dtype=kwargs.get("dtype") or tensor.dtype, device=tensor.device)


def _note_changes(written: Sequence[Tensor]) -> None:
    """Forget the norms of gradients that are changed."""
    norms = _norms.get()
    for tensor in written:
        if norms is not None and isinstance(tensor, Foreign) and tensor.gradient_of:
            norms.pop(tensor.gradient_of, None)


def _set(setter: Callable[[Tensor, Any], None], tensor: Foreign, value: Tensor | None) -> None:
    """Set `grad` or `data`; only the type of the tensor can change here."""
    if value is not None and _is_left_undone([tensor], [tensor], [value]):
        raise _refusal("=", [tensor])
    if norms := _norms.get():
        norms.pop(tensor.origins[0].name, None)
    if isinstance(value, Foreign) and value.dtype != tensor.dtype:
        with without_torch_function():
            setter(tensor, value)


def _outline(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _one_by_one(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator on lists of tensors: at once on those places of the lists that are here, one by one on others."""
    length = len(args[0])

    def at(places: Sequence[int]) -> list[Any]:
        return [[arg[place] for place in places] if _is_list(arg, length) else arg for arg in args]

    here = [place for place in range(length) if not any(isinstance(each, Foreign) for each in _flat(at([place])))]
    results = dict(zip(here, (func(*at(here), **kwargs) or ()) if here else (), strict=False))
    for place in set(range(length)) - set(here):
        if name == "_foreach_norm":
            results[place] = torch.linalg.vector_norm(args[0][place], *args[1:], **kwargs)
        else:
            results.update((place, made) for made in _answered(func, name, at([place]), kwargs) or ())
    return None if name.endswith("_") else [results[place] for place in range(length)]


def _flat(lists: Sequence[Any]) -> list[Any]:
    return [item for each in lists if isinstance(each, list) for item in each]


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _is_left_undone(foreign: Sequence[Foreign], written: Sequence[Tensor], operands: Sequence[Any]) -> bool:
    """True if no rank would do an operation, or not all of it."""
    here = [leaf for leaf in operands if isinstance(leaf, Tensor) and not leaf.is_meta and not _is_count(leaf)]
    left_to_others = bool(written) and all(isinstance(tensor, Foreign) for tensor in written) and not alone.get()
    apart = not frozenset.intersection(*(tensor.ranks for tensor in foreign))
    return apart or any(map(_is_parameter, here)) or bool((written or here) and not left_to_others)


def _is_count(tensor: Tensor) -> bool:
    """True for single numbers in hooks, such as a count of updates.

    If such a number came from parameters, the ranks that change a tensor by it would lack it, and refuse.
    """
    return tensor.dim() == 0 and not _is_parameter(tensor) and not alone.get()


_IN_STEP: Final = "The step runs on this rank only. Do this in the forward of a module."
_IN_HOOK: Final = (
    "Hooks run on every rank, each on what it holds. Let all ranks write around this line, or that which copied the "
    "tensor: `with lightning_gpp.summon_full_params(module):`, in which each has all values "
    "(docs/reference/lightning.md)."
)
_IN_COLLECTIVE: Final = (
    "Ranks hold different tensors, and would combine those of different stages. Leave the call out: gradients are "
    "averaged over pipelines, and a stage's replicas, without it."
)
_IN_PICKLE: Final = (
    "Save by trainer.save_checkpoint, which puts the module together, and leave modules out of "
    "save_hyperparameters(ignore=[...])."
)
_OF_GRADIENT: Final = (
    "Gradients stay on the ranks that hold them, also inside of lightning_gpp.summon_full_params. Skip those of other "
    "ranks by `if not p.is_meta`. (self.trainer.strategy.grad_norm() is the norm of all; strategy.on_nonfinite=skip "
    "leaves out steps with gradients that are not finite.)"
)


def _refusal(name: str, tensors: Sequence[Any], remedy: str = "") -> ForeignTensorError:
    origins = dict.fromkeys(origin for tensor in tensors for origin in tensor.origins)
    named = some([*map(str, origins)], most=2)
    lacks = f"`{name}` needs values of {named}, which this rank does not hold."
    if any(getattr(tensor, "gradient_of", "") or getattr(tensor, "from_gradient", False) for tensor in tensors):
        remedy = remedy or _OF_GRADIENT
    usual = _IN_PICKLE if name == "pickle" else _IN_STEP if alone.get() else _IN_HOOK
    return ForeignTensorError(f"{lacks} {remedy or usual}")


ORDERS: Final = (1.0, 2.0, math.inf)
"""The orders of the norms that are exchanged."""


KnownNorms = dict[str, Sequence[float] | None]
"""The norms of `ORDERS` of gradients by parameter name, as far as they are known; None for a parameter without one."""


@contextmanager
def known(norms: KnownNorms) -> Iterator[None]:
    """Inside, a hook runs, and these norms are known."""
    token = _norms.set(norms)
    try:
        yield
    finally:
        _norms.reset(token)


def exchanged(module: nn.Module, mine: Collection[str], control: Control) -> KnownNorms:
    """The norms of the gradients of all stages. All ranks of a pipeline call this together.

    `mine`: the parameters for which this rank speaks; of each, one rank does.
    """
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if name in mine}
    dense = {
        name: gradient.detach() for name, gradient in gradients.items() if gradient is not None and _is_dense(gradient)
    }
    norms = [torch.linalg.vector_norm(each, order).double() for each in dense.values() for order in ORDERS]
    values = torch.stack(norms).view(-1, len(ORDERS)).tolist() if norms else []  # one wait for the device
    missing = (name for name, each in gradients.items() if each is None)
    table: KnownNorms = {}
    for known_there in control.gather_in_pipeline({**dict.fromkeys(missing), **dict(zip(dense, values, strict=True))}):
        table.update(known_there)
    return table


def _is_dense(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and not gradient.is_complex()


def _order_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """The order of the norm that `linalg_vector_norm` computes; None if it is not a norm of the whole tensor."""
    given = dict(zip(("tensor", "ord", "dim", "keepdim"), args, strict=False)) | dict(kwargs)
    dims = given.get("dim")
    if given.get("keepdim") or (dims is not None and len(dims) < given["tensor"].dim()):
        return None
    return float(given.get("ord", 2.0))
