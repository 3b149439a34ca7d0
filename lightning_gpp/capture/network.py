"""The network: the part of a recording that becomes stages, from the first module call of the step to the last.

Everything before it belongs to the source, everything after it to the step; both run as the user's Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.recorder import BATCH, Recorder
from lightning_gpp.capture.recording import (
    Event,
    ModuleCall,
    Recorded,
    Recording,
    Ref,
    StateRef,
    calls_behind,
    differentiates,
)
from lightning_gpp.capture.refusal import escaped, no_network, refusal
from lightning_gpp.errors import CaptureError
from lightning_gpp.graph import Affine

InputKey = tuple[str, int, int]
"""The place where the source finds an input: ("call", number of the network call, leaf of its arguments), or ("glue",
number of the step's call that combines it with a network value, leaf of that call's arguments)."""


@dataclass(slots=True)
class Network:
    """Calls are renumbered from 0; input number i is `Ref(-1 - i)`. `glue_scopes`: calls at the level of the step."""

    inputs: list[InputKey]
    input_outputs: list[tuple[tuple[int, ...], str, bool]]
    calls: list[Recorded]
    modules: list[ModuleCall]
    needed: list[Ref]
    """Values that the step reads as results of network calls."""
    step_states: list[str]
    step_flops: Affine
    step_saved_bytes: Affine
    step_targets: list[str]
    """Calls of the step itself on network values, before its last network call."""
    recording: Recording
    overwritten: frozenset[Ref] = frozenset()
    """Values of the network that the step changes in place."""

    def network_calls(self) -> list[ModuleCall]:
        return [call for call in self.modules if call.parent == -1]


def extract(recording: Recording, recorder: Recorder) -> Network:
    """Cut the network out of a recording.

    Raises:
        CaptureError: the step uses parameters before its first network call, or a module reads a value that is not an
            argument of its call.
    """
    tops = recording.network_calls()
    if not tops:
        raise no_network()
    return _Extraction(recording, recorder, tops).run()


class _Extraction:
    def __init__(self, recording: Recording, recorder: Recorder, tops: list[ModuleCall]) -> None:
        self.recording, self.network, self.uses, self.tops = recording, recorder.network, recorder.uses, tops
        self.glue = self._glue()
        kept = [c.index for c in recording.calls if c.scope != -1 or c.index in self.glue]
        self.number = {index: number for number, index in enumerate(kept)}
        self.inputs: dict[Ref, tuple[int, InputKey]] = {}
        self.counted: set[int] = set()

    def run(self) -> Network:
        self._find_inputs()
        modules = [self._renumber_module(call) for call in self.recording.modules]
        positions = {call.index: number for number, call in enumerate(self._step_calls())}
        calls = [self._renumber(self.recording.calls[index], positions.get(index, -1)) for index in self.number]
        after = [c for c in self.recording.calls if c.index not in self.number]
        refuse_cut_graphs(self.recording)
        self._check_gradients()
        self._check_source(after)
        self._check_changes()
        return Network(
            inputs=[key for _, key in self.inputs.values()],
            input_outputs=[self.recording.calls[ref.call].outputs[ref.output] for ref in self.inputs],
            calls=calls,
            modules=modules,
            needed=self._needed(after),
            step_states=sorted({*self.recording.left, *(name for call in after for name in call.states())}),
            step_flops=Affine(0, sum(call.flops for call in after)),
            step_saved_bytes=Affine(0, sum(self._newly_saved(call) for call in self._behind_result(after))),
            step_targets=[call.target for call in self._step_calls()],
            recording=self.recording,
            overwritten=frozenset(self._overwritten()),
        )

    def _overwritten(self) -> Iterator[Ref]:
        for call in self.recording.calls:
            yield from (
                Ref(self.number[ref.call], ref.output)
                for ref in call.overwritten
                if call.scope == -1 and ref.call in self.number
            )

    def _step_calls(self) -> list[Recorded]:
        """Calls at the level of the step that read a network value, up to the last network call, in order."""
        last = self.tops[-1].first
        return [c for c in self.recording.calls[:last] if c.scope == -1 and self.network[c.index]]

    def _glue(self) -> set[int]:
        """Numbers of the step's calls that a later network call depends on."""
        passed = [ref for top in self.tops for ref in _refs((top.args, top.kwargs))]
        return {call.index for call in calls_behind(passed, self._step_calls())}

    def _find_inputs(self) -> None:
        for number, top in enumerate(self.tops):
            for leaf, ref in enumerate(pytree.tree_leaves((top.args, top.kwargs))):
                self._add_input(ref, ("call", number, leaf))
        for number, call in enumerate(self._step_calls()):
            if call.index in self.glue:
                for leaf, ref in enumerate(pytree.tree_leaves((call.args, call.kwargs))):
                    self._add_input(ref, ("glue", number, leaf))

    def _add_input(self, ref: Any, key: InputKey) -> None:
        if isinstance(ref, Ref) and not self.network[ref.call] and ref not in self.inputs:
            self.inputs[ref] = (len(self.inputs), key)

    def _new(self, ref: Ref, line: str) -> Ref:
        if ref.call in self.number:
            return Ref(self.number[ref.call], ref.output)
        if ref in self.inputs:
            return Ref(-1 - self.inputs[ref][0], 0)
        raise refusal(
            line,
            "a module reads a tensor that the step computed but did not pass to the module's call",
            "pass it as an argument",
        )

    def _map(self, tree: Any, line: str) -> Any:
        return pytree.tree_map(lambda leaf: self._new(leaf, line) if isinstance(leaf, Ref) else leaf, tree)

    def _renumber(self, call: Recorded, step_number: int) -> Recorded:
        return replace(
            call,
            step_number=step_number,
            index=self.number[call.index],
            saved_bytes=self._newly_saved(call),
            args=self._map(call.args, call.line),
            kwargs=self._map(call.kwargs, call.line),
            mutated=[self._new(ref, call.line) for ref in call.mutated],
            overwritten=[self._new(ref, call.line) for ref in call.overwritten],
            result=self._map(call.result, call.line),
        )

    def _newly_saved(self, call: Recorded) -> int:
        """Bytes that autograd keeps for a call, without those counted for earlier ones."""
        new = {memory: size for memory, size in call.saved.items() if memory not in self.counted}
        self.counted.update(new)
        return sum(new.values())

    def _behind_result(self, calls: list[Recorded]) -> list[Recorded]:
        """The calls that the step's result depends on; autograd frees what it keeps for others with the step."""
        result = _refs(self.recording.result)
        behind = {call.index for call in calls_behind(result, self.recording.calls)}
        return [call for call in calls if call.index in behind] if result else calls

    def _renumber_module(self, call: ModuleCall) -> ModuleCall:
        return replace(
            call,
            args=self._map(call.args, call.line),
            kwargs=self._map(call.kwargs, call.line),
            result=self._map(call.result, call.line),
            first=self._position(call.first),
            last=self._position(call.last),
        )

    def _position(self, index: int) -> int:
        return sum(1 for kept in self.number if kept < index)

    def _needed(self, after: list[Recorded]) -> list[Ref]:
        """Network values that the step reads; all results of the network if the recording ended before the step."""
        answers = [ref for top in self.tops for ref in _refs(top.result)]
        used = [ref for call in after for ref in call.refs()] + self.uses
        inside = [ref for ref in used if ref.call in self.number and ref.call not in self.glue and ref not in answers]
        for ref in inside:
            call = self.recording.calls[ref.call]
            raise escaped(call.line)
        used += [*self._behind_glue(used), *self._unread()]
        if not self.recording.complete:
            used = answers
        wanted = dict.fromkeys(ref for ref in used if ref in set(answers))
        return [self._new(ref, "the step") for ref in wanted if ref.call in self.number or ref in self.inputs]

    def _behind_glue(self, used: list[Ref]) -> list[Ref]:
        """Values from which the step computes again what lies between network calls, because it uses that itself."""
        glue = [self.recording.calls[index] for index in sorted(self.glue)]
        return [ref for call in calls_behind(used, glue) for ref in call.refs()]

    def _unread(self) -> list[Ref]:
        """Results that no recorded call reads: the step may keep them in other ways, for example in a list."""
        read = {ref for call in self.recording.calls for ref in call.refs()} | set(self.uses)
        kept = [_refs(top.result) for top in self.tops if not read & set(_refs(top.result))]
        return [ref for refs in kept for ref in refs]

    def _check_source(self, after: list[Recorded]) -> None:
        reached = {ref.call for ref in self.inputs}
        for call in after:
            needs_gradient = any(grad for _, _, grad in call.outputs) and call.target != BATCH
            if needs_gradient and call.index in reached and not self.network[call.index]:
                raise refusal(
                    call.line,
                    "the step uses a parameter before its first module call",
                    "use the parameter inside a module's forward",
                )

    def _check_gradients(self) -> None:
        """Gradients of the network's results with respect to its arguments would need the graphs of other devices."""
        arguments = {ref for top in self.tops for ref in _refs((top.args, top.kwargs))}
        for call in self.recording.calls:
            if call.scope == -1 and call.function is torch.autograd.grad:
                inputs = pytree.tree_leaves(call.kwargs.get("inputs", call.args[1:2]))
                if any(isinstance(leaf, StateRef) or (isinstance(leaf, Ref) and leaf in arguments) for leaf in inputs):
                    raise without_graph(call.line, "the step differentiates its network")

    def _check_changes(self) -> None:
        """The step runs once per micro-batch, on one rank, and its beginning twice."""
        used = {name for call in self.recording.calls if call.scope != -1 for name in call.states()}
        for change in self.recording.noted(Event.CHANGES_STATE):
            if change.scope == -1 and change.subject in used:
                raise refusal(
                    change.line,
                    f"the step changes {change.subject!r}, which a module reads, and would do so once per micro-batch",
                    "change it in a hook such as on_train_batch_end, or in the forward of the module that reads it",
                )


def _refs(tree: Any) -> list[Ref]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Ref)]


# --- forwards that differentiate (torch.autograd.grad): stages pass values without the graph of what they differentiate


def refuse_cut_graphs(recording: Recording, within: bool = True) -> None:
    """Refuse forwards that differentiate, with the network call around, which is then called whole.

    `within`: also those that differentiate what that call computes.

    Raises:
        CaptureError: there is such a forward.
    """
    for call in filter(differentiates, recording.calls):
        around = recording.modules[recording.network(call.scope)]
        if any(each.index < around.first for each in _differentiated(recording, call)):
            raise without_graph(call.line, "a forward differentiates what other modules have computed")
        if within:
            raise refusal(
                call.line,
                "the forward differentiates what it computes (torch.autograd), so all of that is on one device",
                "do it in the forward of a submodule, which is then never cut, beside others with parameters",
                [around.path],
            )


def _differentiated(recording: Recording, call: Recorded) -> Iterator[Recorded]:
    """The calls behind what a call differentiates that use that with respect to which it does; all that need a gradient
    if it names nothing.
    """
    wanted = {leaf for leaf in pytree.tree_leaves(call.kwargs.get("inputs", call.args[1:2])) if _is_value(leaf)}
    for each in calls_behind(_refs(call.args[:1]), recording.calls):
        used = {*each.refs(), *map(StateRef, each.states())}
        if wanted & used or (not wanted and any(needs_gradient for _, _, needs_gradient in each.outputs)):
            yield each


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Ref | StateRef)


def without_graph(line: str, what: str) -> CaptureError:
    """The error of a gradient that needs the graph of what other devices compute."""
    return refusal(
        line,
        f"{what} (torch.autograd), which is on other devices, without a graph between them",
        "compute this gradient, and a penalty of it, in the forward of a module that calls what it differentiates, "
        "which is then never cut, beside others with parameters",
    )
