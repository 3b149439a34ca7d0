"""Reductions over samples in an evaluation step: losses and means that a module computes, as models given labels do.

in training    F0 F1 (each with its loss)    the step runs on each micro-batch
in evaluation  F0 F1                         the step runs once, and computes the loss of all samples
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import networkx as nx

from lightning_gpp.capture import Capture
from lightning_gpp.graph import Operator

_CLUSTER: Final = "reductions"


def with_reductions_in_step(captured: Capture) -> Capture:
    """The capture with the operators that combine samples, and all that follow from them, in the stage of the step.

    The capture is unchanged if one of them uses parameters, draws random numbers or has to stay with others.
    """
    graph = captured.graph
    names = {operator.name for operator in graph if operator.target != "step" and _mixes(operator)}
    names |= {follower for name in names for follower in nx.descendants(graph.nx, name)}
    found = [graph[name] for name in names]
    if not found or not all(map(_can_move, found)):
        return captured
    moved = replace(graph, nx=graph.nx.copy())
    for operator in found:
        moved.nx.nodes[operator.name]["operator"] = replace(operator, cluster=_CLUSTER)
    return replace(captured, graph=moved)


def _mixes(operator: Operator) -> bool:
    return any(spec.mixes_samples for spec in operator.outputs)


def _can_move(operator: Operator) -> bool:
    return not (operator.parameters or operator.buffers or operator.random or operator.cluster)
