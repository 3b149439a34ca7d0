"""Local losses: results of modules that the step only adds to its loss, so that no stage waits for their gradients.

The gradient of such a result is that of the loss itself, a weight that all ranks know. The stage that computes it also
starts its backward, and the edge to the step carries a number for logs. Where the step detaches what it hands from one
module to the next, no gradient is sent at all:

    step      h = block_0(x);  loss = head_0(h, y)        h = block_1(h.detach());  loss = loss + head_1(h, y)
    stages    block_0, head_0 ──────── h ────────► block_1, head_1, step
                       └───── head_0's loss ───────────────────┘      neither edge carries gradients

Source: local learning in a pipeline is PPLL's (Guo et al., arXiv 2411.12780).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.captured import Capture
from lightning_gpp.capture.operators import name_of
from lightning_gpp.capture.recording import Ref
from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import Affine, OperatorGraph, TensorSpec
from lightning_gpp.wording import some


def with_local_losses(captured: Capture, modules: Sequence[str]) -> Capture:
    """The capture in which results of these modules, and of those in them, are local losses.

    Raises:
        ConfigError: a path has no module that returns one trained number to the step, or another module reads it.
    """
    found = {path: _losses(captured, path) for path in modules}
    for path, refs in found.items():
        if not refs:
            raise ConfigError(_no_losses(captured, path))
    losses = set[Ref]().union(*found.values())
    _check_readers(captured, losses)
    specs = [
        [_local(spec) if Ref(call, output) in losses else spec for output, spec in enumerate(outputs)]
        for call, outputs in enumerate(captured.specs)
    ]
    changed = {name_of(ref.call, captured.network): specs[ref.call] for ref in losses}
    return replace(captured, specs=specs, graph=_marked(captured.graph, changed))


def _local(spec: TensorSpec) -> TensorSpec:
    return replace(spec, requires_grad=False, local_loss=True)


def _losses(captured: Capture, path: str) -> set[Ref]:
    """The numbers that calls of a module, or of modules in it, return to the step, and that are trained."""
    needed = set(captured.network.needed)
    calls = (call for call in captured.network.modules if f"{call.path}.".startswith(f"{path}."))
    results = {leaf for call in calls for leaf in pytree.tree_leaves(call.result) if isinstance(leaf, Ref)}
    return {ref for ref in results & needed if ref.call >= 0 and _is_loss(captured.specs[ref.call][ref.output])}


def _is_loss(spec: TensorSpec) -> bool:
    return spec.requires_grad and all(dim == Affine(0, 1) for dim in spec.shape)


def _check_readers(captured: Capture, losses: Collection[Ref]) -> None:
    for ref in losses:
        edges = captured.graph.nx.out_edges(name_of(ref.call, captured.network), data="outputs")
        readers = [captured.graph[reader] for _, reader, outputs in edges if ref.output in outputs]
        for reader in (operator for operator in readers if operator.target != "step"):
            raise ConfigError(
                f"strategy.local_losses names a loss that {reader.target} reads ({reader.line}) before the step has "
                "all of them, so its gradient is not that of the loss. Add it to the step's loss only, after the last "
                "call of a module."
            )


def _no_losses(captured: Capture, path: str) -> str:
    known = sorted({call.path for call in captured.network.modules if _losses(captured, call.path)})
    hint = f"Those that do: {some(known)}" if known else "None does: let a module compute the loss from the labels"
    return f"strategy.local_losses={path}: no such module returns one trained number to the training step. {hint}."


def _marked(graph: OperatorGraph, specs: Mapping[str, Sequence[TensorSpec]]) -> OperatorGraph:
    """The graph with other outputs of these operators."""
    return graph.with_operators(replace(graph[name], outputs=tuple(outputs)) for name, outputs in specs.items())
