"""Slices of stages: each calls the modules of its unsliced stage with its own tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_gpp.errors import PlanError, add_note
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.planning.assignment.assign import assign
from lightning_gpp.planning.assignment.slices import carried, carried_by, cut_spec, is_cut
from lightning_gpp.runtime.stage import MicroBatch, Slot, StageModule, StageWrapper
from lightning_gpp.sequence import computing
from lightning_gpp.slices import DIM, Unsliced, slice_name
from lightning_gpp.stages.step import StepRunner

Tokens = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SlicedTensor:
    """One slice of a tensor: `part` holds the tokens `[start, stop)` of the tensor `name`."""

    name: str
    tokens: Tokens

    @property
    def part(self) -> str:
        return slice_name(self.name, self.tokens)

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(DIM, self.tokens[0], self.tokens[1] - self.tokens[0])


@dataclass(slots=True, kw_only=True)
class SlicedStage(StageWrapper):
    """Computes the tokens of one slice.

    Args:
        stage: the unsliced stage.
        tokens: interval of this slice.
        length: number of tokens of the sequence.
        earlier: names of tensors that the previous slice carries to this one.
        later: names of tensors that this slice carries to the next one; empty for the last slice.
        received, sent: sliced tensors.
    """

    tokens: Tokens
    length: int
    earlier: tuple[str, ...]
    later: tuple[str, ...]
    received: tuple[SlicedTensor, ...]
    sent: tuple[SlicedTensor, ...]

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The slice's part of every result, from its part of every input and the tensors carried to it."""
        inputs = {**values, **{cut.name: values[cut.part] for cut in self.received}}
        try:
            with computing(self.tokens[0], self.length, [values[name] for name in self.earlier]) as kept:
                outputs = self.stage.forward(inputs, micro_batch)
        except Exception as error:
            add_note(error, _where(self.tokens))
            raise
        parts = {cut.part: outputs[cut.name] for cut in self.sent}
        return {**parts, **dict(zip(self.later, kept, strict=False))}


def _where(tokens: Tokens) -> str:
    return (
        f"It was computing tokens [{tokens[0]}, {tokens[1]}), a slice (strategy.slices). Code that counts tokens must "
        "ask lightning_gpp.sequence.positions (docs/howto/slicing.md); strategy.slice_modules leaves modules unsliced."
    )


@dataclass(slots=True, kw_only=True)
class WholeStage(StageWrapper):
    """An unsliced stage beside slices: joins the tensors that they send, and cuts those that they receive.

    Args:
        stage: the stage itself.
        received: slices of every received tensor, in order, by its name.
        sent: slices of tensors that sliced stages receive.
    """

    received: Mapping[str, Sequence[SlicedTensor]]
    sent: tuple[SlicedTensor, ...]

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The stage's results, and their slices."""
        joined = {name: torch.cat([values[cut.part] for cut in cuts], DIM) for name, cuts in self.received.items()}
        outputs = self.stage.forward({**values, **joined}, micro_batch)
        return {**outputs, **{cut.part: cut.of(outputs[cut.name]) for cut in self.sent}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSource:
    """The source of a plan with slices: cuts data for them."""

    source: StepRunner
    sent: tuple[SlicedTensor, ...]

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """All inputs, and their slices."""
        values = self.source.inputs(micro_batch)
        return {**values, **{cut.part: cut.of(values[cut.name]) for cut in self.sent}}


class Slicer:
    """Makes stages with slices, and the tensors between them, from those of the unsliced plan.

    Args:
        graph: graph of the model.
        plan: the plan with slices.
        whole: the unsliced plan.
        slots: tensors of every edge of the unsliced plan.
        uncut: names of tensors of other sequences, which every slice receives unsliced.

    Raises:
        PlanError: the plan lacks edges between slices that the model needs.
    """

    def __init__(
        self, graph: OperatorGraph, plan: Plan, whole: Unsliced, slots: Sequence[Sequence[Slot]], uncut: Collection[str]
    ) -> None:
        self.plan, self.whole, self._uncut = plan, whole, uncut
        self._slots = {(edge.src, edge.dst): slots[i] for i, edge in enumerate(whole.plan.edges)}
        self._length = max(stage.tokens[1] for stage in plan.stages if stage.tokens is not None)
        assignment = assign(graph, [stage.modules for stage in whole.plan.stages])
        self._carried = [carried_by(graph, assignment, stage) for stage in range(len(whole.plan.stages))]
        self._cuts = [self._cuts_of(edge) for edge in plan.edges]
        self._check_carrying()

    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """The tensors of every edge."""
        return tuple(self._slots_of(edge, cuts) for edge, cuts in zip(self.plan.edges, self._cuts, strict=True))

    def stages(self, stages: Sequence[StageModule]) -> tuple[StageModule, ...]:
        """The stages of the plan, from those of the unsliced plan."""
        return tuple(self._stage(index, stages[number]) for index, number in enumerate(self.whole.numbers))

    def source(self, source: StepRunner) -> CutSource:
        """The source of inputs and of their slices."""
        return CutSource(source=source, sent=self._sent(SOURCE))

    def _check_carrying(self) -> None:
        """Raise PlanError if the plan, which may have been edited, has too few or too many edges between slices."""
        present = {(e.src, e.dst) for e in self.plan.edges if e.src != SOURCE and self._ends(e)[0] == self._ends(e)[1]}
        needed = {
            pair
            for number, specs in enumerate(self._carried)
            for pair in pairwise(self.whole.parts(number) if specs else ())
        }
        if present != needed:
            raise PlanError(
                f"The plan's edges between slices of a stage are {sorted(present)}, the model carries over "
                f"{sorted(needed)}. Make a new plan: gpp-plan ... output=plan.yaml."
            )

    def _stage(self, index: int, stage: StageModule) -> StageModule:
        tokens = self.plan.stages[index].tokens
        received = [cut for edge, cuts in self._edges() if edge.dst == index for cut in cuts]
        sent = self._sent(index)
        if tokens is not None:
            parts = self.whole.parts(self.whole.numbers[index])
            return SlicedStage(
                stage=stage,
                tokens=tokens,
                length=self._length,
                earlier=self._names(index, tokens[0]) if index != parts[0] else (),
                later=self._names(index, tokens[1]) if index != parts[-1] else (),
                received=tuple(received),
                sent=sent,
            )
        if not received and not sent:
            return stage
        names = dict.fromkeys(cut.name for cut in received)
        joined = {name: sorted((c for c in received if c.name == name), key=lambda c: c.tokens) for name in names}
        return WholeStage(stage=stage, received=joined, sent=sent)

    def _edges(self) -> list[tuple[Edge, tuple[SlicedTensor, ...]]]:
        return list(zip(self.plan.edges, self._cuts, strict=True))

    def _sent(self, index: int) -> tuple[SlicedTensor, ...]:
        return tuple(dict.fromkeys(cut for edge, cuts in self._edges() if edge.src == index for cut in cuts))

    def _ends(self, edge: Edge) -> tuple[int, int]:
        numbers = self.whole.numbers
        return (SOURCE if edge.src == SOURCE else numbers[edge.src]), numbers[edge.dst]

    def _tokens(self, edge: Edge) -> Tokens | None:
        above = None if edge.src == SOURCE else self.plan.stages[edge.src].tokens
        return above or self.plan.stages[edge.dst].tokens

    def _cuts_of(self, edge: Edge) -> tuple[SlicedTensor, ...]:
        """The sliced tensors of an edge. Tensors that slices of one stage carry are not sliced."""
        tokens = self._tokens(edge)
        if tokens is None or edge.artificial:
            return ()
        slots = self._slots.get(self._ends(edge), ())
        return tuple(SlicedTensor(slot.name, tokens) for slot in slots if self._is_cut(slot))

    def _is_cut(self, slot: Slot) -> bool:
        return slot.name not in self._uncut and is_cut(slot.spec, self._length)

    def _slots_of(self, edge: Edge, cuts: Sequence[SlicedTensor]) -> tuple[Slot, ...]:
        ends = self._ends(edge)
        if edge.artificial:
            return ()
        if ends[0] == ends[1]:
            return self._carried_slots(edge)
        parts = {cut.name: cut for cut in cuts}
        return tuple(self._slot(slot, parts.get(slot.name)) for slot in self._slots[ends])

    def _slot(self, slot: Slot, cut: SlicedTensor | None) -> Slot:
        if cut is None:
            return slot
        return Slot(cut.part, cut_spec(slot.spec, DIM, cut.tokens[1] - cut.tokens[0]))

    def _carried_slots(self, edge: Edge) -> tuple[Slot, ...]:
        stage = self.plan.stages[edge.src]
        stop = stage.tokens[1] if stage.tokens is not None else 0
        specs = self._carried[self.whole.numbers[edge.src]]
        names = self._names(edge.src, stop)
        return tuple(Slot(name, cut_spec(spec, dim, stop)) for name, (spec, dim) in zip(names, specs, strict=True))

    def _names(self, index: int, stop: int) -> tuple[str, ...]:
        """Names of the tensors that the slice up to token `stop` carries to the next one."""
        number = self.whole.numbers[index]
        return tuple(slice_name(f"carried{n}", (0, stop)) for n in range(len(self._carried[number])))


def repeated(items: Sequence[tuple[str, ...]], whole: Unsliced) -> tuple[tuple[str, ...], ...]:
    """Entries of the unsliced stages, repeated for each of their slices."""
    return tuple(items[number] for number in whole.numbers)


def with_whole_inputs(graph: OperatorGraph) -> OperatorGraph:
    """The graph with the operators marked that work on sequences of another length than the carried one.

    A sliced decoder reads all results of an encoder. Two sequences of one length look the same: the self-check refuses
    what becomes wrong then.
    """
    lengths = {int(operator.outputs[0].shape[at].fixed) for operator, at in carried(graph).values()}
    if len(lengths) != 1:
        return graph
    length, whole, sliced = lengths.pop(), set[str](), set[str]()
    for operator in graph:
        sources = set(graph.nx.predecessors(operator.name))
        is_input = operator.target == "input"
        if sources & sliced or (is_input and is_cut(operator.outputs[0], length)):
            sliced.add(operator.name)
        elif sources & whole or is_input:
            whole.add(operator.name)
    return graph.with_whole(frozenset(whole))
