"""Forwards that differentiate (`torch.autograd.grad`): they need the graph of what they differentiate.

Stages pass values without graphs, so the module that computes all of it is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import networkx as nx
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
    graph = nx.DiGraph()
    for each in recording.calls:
        sources = [*(ref.call for ref in each.refs()), *map(StateRef, each.states())]
        if any(needs_gradient for _, _, needs_gradient in each.outputs):
            graph.add_edges_from((source, each.index) for source in sources)
    outputs = {leaf.call for leaf in pytree.tree_leaves(call.args[0]) if isinstance(leaf, Ref)}
    before = outputs.union(*(nx.ancestors(graph, output) for output in outputs if output in graph))
    wanted = _wanted(call) & set(graph)
    behind = set[Any]().union(*(nx.descendants(graph, each) for each in wanted)) if wanted else set(graph)
    return min((each for each in before & behind if isinstance(each, int)), default=call.index)


def _wanted(call: Recorded) -> set[int | StateRef]:
    """The calls and states that get a gradient; none if all leaves of the graph do."""
    inputs = pytree.tree_leaves(call.kwargs.get("inputs", call.args[1:2]))
    refs = (leaf for leaf in inputs if isinstance(leaf, Ref | StateRef))
    return {leaf.call if isinstance(leaf, Ref) else leaf for leaf in refs}
