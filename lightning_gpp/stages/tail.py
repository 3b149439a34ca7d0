"""The tail of a network: what the stage with the user's step computes after the last modules with parameters.

Models that return their loss compute it there. What the tail reads still has samples, the loss has none, so the tail
can run again on some of them.

    stage    lm_head ─► logits ─► view ─► cross_entropy ─► loss ─► the user's step
                                 └────────── tail ────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from torch import nn

from lightning_gpp.capture.isolate import names_of
from lightning_gpp.capture.network import Network
from lightning_gpp.capture.recording import Recorded, Ref
from lightning_gpp.graph import TensorSpec
from lightning_gpp.stages.code import StageCode, StageFunction


@dataclass(frozen=True, slots=True)
class Tail:
    """Calls that can run again on some of the samples.

    Args:
        network: the captured network.
        calls: numbers of the calls; none uses parameters, draws random numbers, or changes a value or a buffer.
        read: values that they read.
        results: values that they compute and the user's step reads.
        specs: the shape and dtype of a value.
    """

    network: Network
    calls: frozenset[int]
    read: tuple[Ref, ...]
    results: tuple[Ref, ...]
    specs: Callable[[Ref], TensorSpec]

    def compile(self, module: nn.Module) -> StageFunction:
        """A function of the values that are read and the number of samples; it calls modules of `module`."""
        return StageCode(
            self.network, module, set(self.calls), list(self.read), list(self.results), self.specs
        ).compile()


def tail_of(code: StageCode, answers: Sequence[Ref]) -> Tail | None:
    """The tail of a compiled stage, whose results the user's step reads; None if all of these have samples."""
    if not any(code.specs(ref).mixes_samples for ref in answers):
        return None
    calls = _repeatable(code, answers)
    results = tuple(ref for ref in answers if ref.call in calls)
    read = dict.fromkeys(ref for number in sorted(calls) for ref in code.network.calls[number].refs())
    outside = tuple(ref for ref in read if ref.call not in calls)
    return Tail(code.network, frozenset(calls), outside, results, code.specs) if results else None


def _repeatable(code: StageCode, answers: Sequence[Ref]) -> set[int]:
    """Numbers of the calls after which only such calls, and the step, follow."""
    readers, asked = _readers(code.network), {ref.call for ref in answers}
    changed = {change.name for change in code.network.recording.state_changes}
    excluded = changed | {name for tensor, name in names_of(code.module) if isinstance(tensor, nn.Parameter)}
    found: set[int] = set()
    for unit in reversed(_units(code)):
        follow = {reader for number in unit for reader in readers.get(number, ())} - set(unit)
        used = bool(follow) or not asked.isdisjoint(unit)
        if used and follow <= found and all(_is_plain(code.network.calls[number], excluded) for number in unit):
            found.update(unit)
    return found


def _readers(network: Network) -> dict[int, set[int]]:
    readers: dict[int, set[int]] = {}
    for call in network.calls:
        for ref in call.refs():
            readers.setdefault(ref.call, set()).add(call.index)
    return readers


def _units(code: StageCode) -> list[list[int]]:
    """The calls of a stage in order, those inside of a module that it calls as a whole together."""
    units: dict[int, list[int]] = {}
    firsts = {number: call.first for call in code.whole_calls for number in range(call.first, call.last)}
    for number in sorted(code.mine):
        units.setdefault(firsts.get(number, number), []).append(number)
    return sorted(units.values(), key=lambda unit: unit[-1])


def _is_plain(call: Recorded, excluded: Set[str]) -> bool:
    changes = call.mutated or call.overwritten
    return not (call.random or changes or call.checkpoint is not None or not excluded.isdisjoint(call.states()))
