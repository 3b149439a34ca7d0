"""Regions of tensor parallelism: modules inside which values are divided among the members of a device.

Between the layers of a block each member has a part of the activations, for example of the heads. A stage must not end
there: messages are undivided. So the smallest module around such values is called whole. Which values are divided is
found by a comparison: the network runs with and without the division, on tensors without memory, and modules whose
results have other shapes return a part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture import Capture
from lightning_gpp.capture.recording import AffineSize, ModuleCall, Ref
from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.runtime.random import undisturbed
from lightning_gpp.training.control import Control
from lightning_gpp.training.divided.tensor_parallel import TensorParallel
from lightning_gpp.wording import named

Regions = dict[str, str]
"""Modules that are called whole, by path, with the reasons."""

Shapes = dict[str, list[Any]]
"""The results of modules by path, with shapes for tensors."""

REASON = "Tensor parallelism divides values inside it."
_NUM_SAMPLES = 4


def captured_apart(
    record: Callable[[Mapping[str, str]], Capture],
    parallel: TensorParallel | None,
    module: nn.Module,
    context: Callable[[], AbstractContextManager[Any]],
    num_devices: int,
    agreed: Callable[[Callable[[], Regions]], Regions],
) -> Capture:
    """A capture in which regions are called whole; its graph knows the operators inside, if this is the first one.

    Args:
        record: captures the step, with these modules called whole.
        parallel: the division; None without tensor parallelism. It gets the regions, if it has none yet.
        module: the module.
        context: entered around calls, for example autocast.
        num_devices: number of devices of a pipeline.
        agreed: gives the regions that were found here to a job's other processes, and returns those of all.

    Raises:
        ConfigError: there is nothing to cut, or what a module returns to the step is divided.
    """
    if parallel is None:
        return record({})
    detail = None
    if not parallel.regions:
        captured = record({})
        parallel.regions.update(agreed(partial(regions_of, parallel, module, captured, context)))
        check_regions(parallel.regions, module, num_devices)
        detail = captured.graph
    apart = record(parallel.regions)
    apart.graph.regions, apart.graph.detail = frozenset(parallel.regions), detail
    return apart


def regions_of(
    parallel: TensorParallel,
    module: nn.Module,
    captured: Capture,
    context: Callable[[], AbstractContextManager[Any]],
) -> Regions:
    """The outermost modules in which values are divided, by path, with the reason.

    Args:
        parallel: the division.
        module: the undivided module.
        captured: its step.
        context: entered around the calls, for example autocast.

    Raises:
        ConfigError: what a module returns to the step is divided.
    """
    found: set[str] = set()
    if parallel.degree == 1:
        return {}
    plain, divided = parallel.outline(module, applied=False), parallel.outline(module)
    for call in captured.network.network_calls():
        found |= set(_regions_in(call, captured, plain, divided, context))
    return outermost(found)


def outermost(found: Collection[str]) -> Regions:
    """The regions of modules around divided values: those that are not inside others."""
    return {path: REASON for path in found if not any(_is_inside(path, other) for other in found)}


def check_regions(regions: Collection[str], module: nn.Module, num_devices: int) -> None:
    """Raise ConfigError if a region has all parameters, so that there is nothing to cut into stages."""
    every = {id(parameter) for parameter in module.parameters()}
    for path in regions:
        if num_devices > 1 and every <= {id(parameter) for parameter in module.get_submodule(path).parameters()}:
            raise ConfigError(
                f"configure_model divides values between the layers of {named(path)} among processes, so it cannot be "
                f"cut into stages for {num_devices} devices. Let every block return undivided values "
                "(output_layouts=Replicate() for its last layer)."
            )


def _regions_in(
    call: ModuleCall,
    captured: Capture,
    plain: nn.Module,
    divided: nn.Module,
    context: Callable[[], AbstractContextManager[Any]],
) -> Iterator[str]:
    args, kwargs = pytree.tree_map(partial(_made, captured), (call.args, call.kwargs))
    with context(), undisturbed(), torch.no_grad():
        try:
            expected = _shapes(plain, call.path, args, kwargs)
        except Exception:  # the user's code depends on values, so nothing is known of its inside
            yield call.path
            return
        try:
            actual = _shapes(divided, call.path, args, kwargs)
        except Exception as error:
            raise ConfigError(
                f"configure_model divides {named(call.path)} among processes in a way in which it cannot run: "
                f"{type(error).__name__}: {error} Between two divided layers, torch needs sizes that are multiples of "
                "strategy.tensor_parallel_size; choose another number, or other sizes."
            ) from error
    for path, results in actual.items():
        if results != expected.get(path):
            yield _around(path, call, expected)


def _around(path: str, call: ModuleCall, called: Shapes) -> str:
    """The smallest module that was called around another."""
    while path != call.path:
        path = path.rpartition(".")[0]
        if path in called:
            return path
    raise ConfigError(
        f"configure_model divides the result of {named(path)}, which goes to the step. Give the style of "
        "its last layer in parallelize_module output_layouts=Replicate()."
    )


def _is_inside(path: str, other: str) -> bool:
    return path.startswith(f"{other}.") or (other == "" != path)


def _made(captured: Capture, leaf: Any) -> Any:
    """An argument without memory."""
    if isinstance(leaf, AffineSize):
        return int(leaf.value.at(_NUM_SAMPLES))
    if not isinstance(leaf, Ref):
        return leaf
    spec = captured.inputs[-1 - leaf.call] if leaf.call < 0 else captured.specs[leaf.call][leaf.output]
    return torch.empty(spec.sizes(_NUM_SAMPLES), dtype=getattr(torch, spec.dtype), device="meta")


def _shapes(whole: nn.Module, path: str, args: Any, kwargs: Any) -> Shapes:
    """The results of a module and of those inside it."""
    shapes: Shapes = {}
    part = whole.get_submodule(path)
    with _noted(part, path, shapes):
        part(*args, **kwargs)
    return shapes


@contextmanager
def _noted(part: nn.Module, path: str, shapes: Shapes) -> Iterator[None]:
    def note(name: str, _: nn.Module, __: Any, result: Any) -> None:
        shapes.setdefault(name, []).append([_shape(leaf) for leaf in pytree.tree_leaves(result)])

    hooks: list[RemovableHandle] = []
    for inner, each in part.named_modules():
        full = ".".join(filter(None, (path, inner)))
        hooks.append(each.register_forward_hook(partial(note, full)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _shape(leaf: Any) -> Any:
    return (type(leaf).__name__, tuple(leaf.shape)) if isinstance(leaf, Tensor) else None


def agreed_regions(control: Control, find: Callable[[], Regions]) -> Regions:
    """The regions of all devices together. All processes call this together.

    Raises:
        GPPError: on all processes, what `find` raises on some.
    """
    outcome: Regions | GPPError
    try:
        outcome = find()
    except GPPError as error:
        outcome = error
    outcomes = control.gather_all(outcome)
    for refused in (each for each in outcomes if isinstance(each, GPPError)):
        raise refused.with_traceback(None)
    return outermost({path for regions in outcomes for path in regions})
