"""Detects inputs that are another sequence than the sliced one, although they may have as many tokens.

A sliced decoder reads all results of an encoder. Lengths distinguish the two sequences only if they differ, so inputs
are shortened by a token in a run on fake tensors: those that can be shorter while the model carries as many tokens as
before do not belong to the carried sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import combinations, islice
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import fake_mode
from lightning_gpp.capture.captured import Capture
from lightning_gpp.capture.isolate import isolated_copy
from lightning_gpp.graph import OperatorGraph, TensorSpec
from lightning_gpp.plan import STEP, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.planning.assignment.slices import carried, cut_spec, is_cut
from lightning_gpp.runtime.boundary import DTYPES
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.sequence import observed
from lightning_gpp.stages.build import build

SAMPLES: Final = 4
MOST_RUNS: Final = 64
"""Limit on the sets of inputs that are tried, largest first."""


def with_whole_inputs(
    captured: Capture,
    module: nn.Module,
    dim: int,
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
) -> OperatorGraph:
    """The graph with the operators marked that work on other sequences than the carried one."""
    lengths = {int(operator.outputs[0].shape[at].fixed) for operator, at in carried(captured.graph).values()}
    if len(lengths) != 1:
        return captured.graph
    length = lengths.pop()
    inputs = {f"input{number}": spec for number, spec in enumerate(captured.inputs)}
    candidates = [name for name, spec in inputs.items() if is_cut(spec, dim, length)]
    others = {name for name in inputs if name not in candidates}
    if len(candidates) > 1 and length > 1:
        others.update(_others(_ShortenedRun(captured, module, dim, context, device), candidates, length))
    return captured.graph.with_whole(_work_on(captured.graph, others, set(inputs) - others))


def _others(trial: _ShortenedRun, candidates: list[str], length: int) -> tuple[str, ...]:
    """The largest set of inputs that can be shorter while all carried tensors keep their length."""
    if trial.carried_lengths(()) != {length}:
        return ()
    sets = (found for size in range(len(candidates) - 1, 0, -1) for found in combinations(candidates, size))
    return next((found for found in islice(sets, MOST_RUNS) if trial.carried_lengths(found) == {length}), ())


def _work_on(graph: OperatorGraph, others: Iterable[str], cut: set[str]) -> frozenset[str]:
    """Operators that depend on inputs of other sequences only, not on inputs of the sliced one."""
    whole, mixed = set(others), set(cut)
    for operator in graph:
        sources = set(graph.nx.predecessors(operator.name))
        if sources & mixed:
            mixed.add(operator.name)
        elif sources & whole:
            whole.add(operator.name)
    return frozenset(whole)


class _ShortenedRun:
    """Runs the network on fake tensors."""

    def __init__(
        self,
        captured: Capture,
        module: nn.Module,
        dim: int,
        context: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
    ) -> None:
        self._inputs, self._dim, self._context, self._device = captured.inputs, dim, context, device
        self._mode = fake_mode()
        drafts = [
            Stage(name=name, modules=modules, devices=(0,), micro_batch_size=SAMPLES)
            for name, modules in (("network", ("",)), ("step", (STEP,)))
        ]
        plan = make_plan(captured.graph, drafts, batch_size=SAMPLES)
        self._stage = build(captured, plan, isolated_copy(module, self._mode, device)).stages[0]

    def carried_lengths(self, shorter: Iterable[str]) -> set[int]:
        """Lengths of carried tensors if these inputs are one token shorter; empty if the network cannot run then."""
        short = set(shorter)
        with self._mode, self._context(), torch.no_grad(), observed() as lengths:
            values = {
                f"input{number}": self._empty(spec, f"input{number}" in short)
                for number, spec in enumerate(self._inputs)
            }
            try:
                self._stage.forward(values, MicroBatch(0, 0, SAMPLES, SAMPLES))
            except Exception:  # the user's code may raise anything for sizes that it is not made for
                return set()
        return set(lengths)

    def _empty(self, spec: TensorSpec, short: bool) -> Tensor:
        if short:
            spec = cut_spec(spec, self._dim, int(spec.shape[self._dim].fixed) - 1)
        return torch.zeros(spec.sizes(SAMPLES), dtype=DTYPES[spec.dtype], device=self._device)
