"""The operator graph of a network: an operator for each input and call, and one for the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import networkx as nx
from torch import nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.isolate import add_sizes
from lightning_gpp.capture.network import Network
from lightning_gpp.capture.recording import Recorded, Ref
from lightning_gpp.graph import Operator, OperatorGraph, TensorSpec
from lightning_gpp.plan import STEP
from lightning_gpp.runtime.named_tensors import paths_around

SHAPE_READERS: Final = frozenset(
    (
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "positions"),
    )
)
"""Functions that read the shape, dtype and device of their arguments, but not their values."""

FIRST_READERS: Final = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})
"""Functions that read the values of their first argument only."""


def name_of(call: int, network: Network) -> str:
    """The name of the operator of a recorded call; inputs have negative numbers."""
    if call < 0:
        return f"input{-1 - call}"
    return f"{call:04d}_{network.calls[call].target}"


def graph_of(
    module: nn.Module, network: Network, specs: list[list[TensorSpec]], inputs: list[TensorSpec]
) -> OperatorGraph:
    """The operator graph of a network. `specs`: of the outputs of its calls. `inputs`: of its inputs."""
    graph = OperatorGraph(uncalled=_uncalled({call.path for call in network.modules}))
    for number, spec in enumerate(inputs):
        graph.add(Operator(name=f"input{number}", target="input", module="@source", outputs=(spec,)))
    names, groups = {name for name, _ in module.named_parameters()}, _sharing_memory(network.calls)
    for call, outputs in zip(network.calls, specs, strict=True):
        states = list(dict.fromkeys(call.states()))
        path = network.modules[call.scope].path if call.scope != -1 else ""
        graph.add(
            Operator(
                name=name_of(call.index, network),
                target=call.target,
                module=path,
                parameters=tuple(name for name in states if name in names),
                buffers=tuple(name for name in states if name not in names),
                outputs=tuple(outputs),
                flops=call.flops,  # type: ignore[arg-type]
                saved_bytes=call.saved_bytes,  # type: ignore[arg-type]
                random=call.random,
                cluster=_cluster(call, groups),
                line=call.line,
            )
        )
        _connect(graph, network, call.refs(), name_of(call.index, network))
    _add_step(graph, network, names)
    add_sizes(graph, module)
    return graph


def _cluster(call: Recorded, groups: Mapping[int, int]) -> str:
    """The name of the calls that have to be in one stage with this one; empty if it may be alone."""
    if call.checkpoint is not None:
        return f"checkpoint{call.checkpoint}"
    return f"memory{groups[call.index]}" if call.index in groups else ""


def _uncalled(called: set[str]) -> frozenset[str]:
    """Paths around called modules that are never called."""
    around = {path for each in called for path in paths_around(each)}
    return frozenset(around - called)


def _connect(graph: OperatorGraph, network: Network, refs: list[Ref], target: str) -> None:
    for ref in refs:
        graph.connect(name_of(ref.call, network), target, ref.output)


def _add_step(graph: OperatorGraph, network: Network, names: set[str]) -> None:
    graph.add(
        Operator(
            name="step",
            target="step",
            module=STEP,
            parameters=tuple(name for name in network.step_states if name in names),
            buffers=tuple(name for name in network.step_states if name not in names),
            flops=network.step_flops,
            saved_bytes=network.step_saved_bytes,
        )
    )
    _connect(graph, network, network.needed, "step")


def _sharing_memory(calls: Sequence[Recorded]) -> dict[int, int]:
    """The group of each call that changes views in place, or makes them, by its number; others are left out.

    A stage must have all of a group, because messages copy:

        stage a    linear ─► h
        stage b              h ─► view ─► [::2] ─► add_      changes h, if the views are views of what this stage has

    What was there before all of a group comes from outside: its stage copies that before it changes it.
    """
    groups: nx.Graph[int] = nx.Graph()
    for call in calls:
        makers = sorted({_first(ref, calls).call for ref in call.overwritten})
        groups.add_edges_from((call.index, maker) for maker in makers[1:])
    return {member: min(group) for group in nx.connected_components(groups) for member in group}


def _first(ref: Ref, calls: Sequence[Recorded]) -> Ref:
    """The value as it was before calls changed it in place."""
    while ref.call >= 0 and (place := ref.output - calls[ref.call].num_returned) >= 0:
        ref = calls[ref.call].mutated[place]
    return ref


def mark_mixing(
    network: Network, specs: Sequence[Sequence[TensorSpec]], inputs: Sequence[TensorSpec]
) -> list[list[TensorSpec]]:
    """The specs of all calls' outputs, with `mixes_samples` set on those that mix samples.

    They depend on the data, but have no dimension that counts samples (a mean, a loss, `x[0]`). Replicas that share a
    micro-batch would each compute a different value, and so would a stage with smaller micro-batches; nothing says
    which of them is right, or how to combine them.
    """
    dependent = {Ref(-1 - number) for number, spec in enumerate(inputs) if spec.varies}
    marked: list[list[TensorSpec]] = []
    for call, outputs in zip(network.calls, specs, strict=True):
        reads_samples = not dependent.isdisjoint(_read(call))
        marked.append([replace(spec, mixes_samples=reads_samples and _lacks_samples(spec)) for spec in outputs])
        if reads_samples:
            dependent.update(Ref(call.index, output) for output in range(len(outputs)))
        else:
            dependent.update(Ref(call.index, output) for output, spec in enumerate(outputs) if spec.varies)
    return marked


def _lacks_samples(spec: TensorSpec) -> bool:
    """True if no dimension of the tensor counts samples, or several do, which pairs every sample with every other."""
    return sum(bool(dim.per_sample) for dim in spec.shape) != 1


def _read(call: Recorded) -> Iterable[Ref]:
    """References to the values that a call reads."""
    if call.target in SHAPE_READERS:
        return ()
    values: Any = (call.args[:1], call.mutated) if call.target in FIRST_READERS else (call.args, call.kwargs)
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Ref)] + call.mutated
