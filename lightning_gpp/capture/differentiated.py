"""Forwards that differentiate (`torch.autograd.grad`): they need the graph of what they differentiate.

Stages pass values without graphs, so the module that computes all of it is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.recording import Recorded, Recording, Ref, StateRef
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import CaptureError

_BACKWARDS: Final[Sequence[Callable[..., Any]]] = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def differentiates(call: Recorded) -> bool:
    """True for a call by which a forward runs backwards."""
    return call.scope != -1 and call.function in _BACKWARDS


def refuse_cut_graphs(recording: Recording, within: bool = True) -> None:
    """Refuse forwards that differentiate, with the modules that would have to be called whole.

    `within`: also those that differentiate what one network call computes.

    Raises:
        CaptureError: there is such a forward.
    """
    for call in filter(differentiates, recording.calls):
        modules = list(_modules_around(recording, call))
        if within or not modules:
            raise _refused(call, modules)


def _refused(call: Recorded, modules: list[str]) -> CaptureError:
    if not modules:
        return refusal(
            call.line,
            "a forward differentiates (torch.autograd) what other modules have computed, without a graph between them",
            "call these modules in the forward of one module, beside others with parameters, and differentiate there",
        )
    return refusal(
        call.line,
        "the forward differentiates what it computes (torch.autograd), so all of that is on one device",
        "do it in the forward of a submodule, which is then never cut, beside others with parameters",
        modules,
    )


def _modules_around(recording: Recording, call: Recorded) -> Iterator[str]:
    """Paths of the module calls around a call that compute all that it differentiates, the innermost first."""
    first, scope = _first_between(recording, call), call.scope
    while scope != -1:
        module = recording.modules[scope]
        if module.first <= first:
            yield module.path
        scope = module.parent


def _first_between(recording: Recording, call: Recorded) -> int:
    """The number of the first call between what is differentiated, and that with respect to which it is."""
    before = _before(recording, call.args[0])
    return min((each for each in _behind(recording, _wanted(call)) if each in before), default=call.index)


def _wanted(call: Recorded) -> set[Ref | StateRef]:
    """The values that get a gradient; none if all leaves of the graph do."""
    inputs = pytree.tree_leaves(call.kwargs.get("inputs", call.args[1:2]))
    return {leaf for leaf in inputs if isinstance(leaf, Ref | StateRef)}


def _before(recording: Recording, outputs: Any) -> set[int]:
    """Numbers of the calls that some values depend on."""
    found = {leaf.call for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Ref)}
    for call in reversed(recording.calls):
        if call.index in found:
            found.update(ref.call for ref in call.refs())
    return found


def _behind(recording: Recording, wanted: set[Ref | StateRef]) -> set[int]:
    """Numbers of the calls that need a gradient and depend on what gets one."""
    found = set[int]()
    for call in recording.calls:
        sources = {*call.refs(), *map(StateRef, call.states())}
        reads = not wanted or not wanted.isdisjoint(sources) or any(ref.call in found for ref in call.refs())
        if reads and any(needs_gradient for _, _, needs_gradient in call.outputs):
            found.add(call.index)
    return found
