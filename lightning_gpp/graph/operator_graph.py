"""The operator graph: the operators of a step and the tensors between them, as plain data.

Sizes are affine in the number of samples (`Affine`), so one graph serves every micro-batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import networkx as nx

DTYPE_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
}

BATCH_STATISTICS: Final = frozenset({"batch_norm"})
"""Operators whose outputs have one row per sample although every row depends on all samples."""


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantity that depends on the number of samples `b`: `per_sample * b + fixed`."""

    per_sample: float = 0
    fixed: float = 0

    def at(self, num_samples: int) -> float:
        return self.per_sample * num_samples + self.fixed

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.per_sample + other.per_sample, self.fixed + other.fixed)

    def __sub__(self, other: Affine) -> Affine:
        return self + other * -1

    def __mul__(self, factor: float) -> Affine:
        return Affine(self.per_sample * factor, self.fixed * factor)

    def __str__(self) -> str:
        if not self.per_sample:
            return f"{self.fixed:g}"
        term = "b" if self.per_sample == 1 else f"{self.per_sample:g}b"
        return f"{term}{self.fixed:+g}" if self.fixed else term


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape (affine in the number of samples), dtype and differentiability of a tensor.

    `mixes_samples`: the values depend on the samples, but not sample by sample (a mean over them, a loss).
    `local_loss`: a loss at which its stage starts its backward, so it gets no gradient from others.
    """

    shape: tuple[Affine, ...]
    dtype: str
    requires_grad: bool = False
    mixes_samples: bool = False
    local_loss: bool = False

    def sizes(self, num_samples: int) -> tuple[int, ...]:
        """Concrete shape for `num_samples` samples."""
        return tuple(int(dim.at(num_samples)) for dim in self.shape)

    def bytes(self, num_samples: int) -> int:
        count = 1
        for size in self.sizes(num_samples):
            count *= size
        return count * DTYPE_BYTES[self.dtype]

    @property
    def affine_bytes(self) -> Affine:
        """Bytes as a function of the number of samples, exact for 0 and 1."""
        fixed = self.bytes(0)
        return Affine(self.bytes(1) - fixed, fixed)

    @property
    def batch_dim(self) -> int | None:
        """The dimension that grows with the samples; None if no dimension does."""
        dims = [i for i, dim in enumerate(self.shape) if dim.per_sample]
        return dims[0] if len(dims) == 1 else None

    @property
    def sliceable(self) -> bool:
        """True if one sample is one index of the batch dimension, so that intervals of samples can be cut out."""
        dim = self.batch_dim
        return dim is not None and self.shape[dim] == Affine(1, 0)

    @property
    def varies(self) -> bool:
        return any(dim.per_sample for dim in self.shape)

    @property
    def divisible(self) -> bool:
        """True if a subset of the samples can have its own tensor: a part that is cut out, or the same one for all."""
        return not self.mixes_samples and (self.sliceable or not self.varies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator: a call recorded from the user's model.

    `module` is the path of the innermost module call it belongs to ("" is the root). `saved_bytes` is what autograd
    keeps for its backward. `flops` counts the forward. `parameters` and `buffers` are original names. Operators with
    the same non-empty `cluster` must stay in one stage. `line` is where the user's code called it.
    `target` is "input" for a value that the user's step hands to the network, "step" for the user's step.
    """

    name: str
    target: str
    module: str = ""
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    flops: Affine = Affine()
    saved_bytes: Affine = Affine()
    random: bool = False
    cluster: str = ""
    line: str = ""

    @property
    def mixes_samples(self) -> bool:
        """True if replicas that share a micro-batch would compute something different from one device alone."""
        return self.target in BATCH_STATISTICS or any(spec.mixes_samples for spec in self.outputs)


@dataclass(slots=True)
class OperatorGraph:
    """Operators by name, in recorded order, and the tensors between them: edge attribute `outputs` of `nx`.

    `whole`: operators known to work on other sequences than the one along which the model may be cut.
    `uncalled`: paths around modules that are never called themselves, as those of lists of modules.
    `divided`: parameters that the members of a device divide (tensor parallelism), with the dimension that is cut.
    `regions`: paths of modules that are one operator because results inside are divided.
    `detail`: the same step with the operators inside of regions; None if it is not known.
    `parts`: see `graph.parts`. `assigned`: the stages of operators by the stages' modules, see `assign`.
    `model`: a graph of the same operators, which are assigned as there, though their sizes differ; None for itself.
    """

    nx: nx.DiGraph = field(default_factory=nx.DiGraph)
    operators: dict[str, Operator] = field(default_factory=dict)
    parameter_bytes: dict[str, int] = field(default_factory=dict)
    parameter_sizes: dict[str, int] = field(default_factory=dict)
    buffer_bytes: dict[str, int] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    uncalled: frozenset[str] = frozenset()
    divided: dict[str, int] = field(default_factory=dict)
    regions: frozenset[str] = frozenset()
    detail: OperatorGraph | None = None
    parts: dict[int, OperatorGraph] = field(default_factory=dict, init=False, repr=False, compare=False)
    assigned: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    model: OperatorGraph | None = field(default=None, init=False, repr=False, compare=False)

    def follow(self, other: OperatorGraph) -> None:
        """Assign operators to stages as those of another graph, if it has the same ones, perhaps of other sizes."""
        mine, theirs = ([(each.name, each.module, each.cluster) for each in graph] for graph in (self, other))
        if mine == theirs and [*self.nx.edges(data="outputs")] == [*other.nx.edges(data="outputs")]:
            self.model = other

    def with_whole(self, whole: frozenset[str]) -> OperatorGraph:
        """The same graph with these operators as `whole`."""
        return replace(self, whole=whole)

    def for_inference(self) -> OperatorGraph:
        """The same operators without a backward: no tensor needs a gradient, and nothing is saved for one."""
        detail = None if self.detail is None else self.detail.for_inference()
        return replace(self, detail=detail).with_operators(
            replace(
                operator,
                outputs=tuple(replace(spec, requires_grad=False) for spec in operator.outputs),
                saved_bytes=Affine(),
            )
            for operator in self
        )

    def with_operators(self, operators: Iterable[Operator]) -> OperatorGraph:
        """The same graph with these operators in place of those of their names."""
        return replace(self, operators={**self.operators, **{operator.name: operator for operator in operators}})

    @property
    def mixes_samples(self) -> bool:
        """True if a value before the step's own result depends on several samples in a way that no cut respects."""
        return any(spec.mixes_samples for operator in self if operator.target != "step" for spec in operator.outputs)

    @property
    def input_bytes(self) -> Affine:
        """Bytes of the data that operators read."""
        names = [operator.name for operator in self if operator.target == "input"]
        read = {(name, output) for name, _, outputs in self.nx.out_edges(names, data="outputs") for output in outputs}
        return sum((self[name].outputs[output].affine_bytes for name, output in read), Affine())

    def add(self, operator: Operator) -> None:
        self.operators[operator.name] = operator
        self.nx.add_node(operator.name)

    def connect(self, source: str, target: str, output: int) -> None:
        """Add an edge: `target` reads output number `output` of `source`."""
        if self.nx.has_edge(source, target):
            outputs = self.nx.edges[source, target]["outputs"]
            self.nx.edges[source, target]["outputs"] = tuple(sorted({*outputs, output}))
        else:
            self.nx.add_edge(source, target, outputs=(output,))

    def __getitem__(self, name: str) -> Operator:
        return self.operators[name]

    def __iter__(self) -> Iterator[Operator]:
        """Operators in recorded order, which is a topological one."""
        return iter(self.operators.values())

    def __len__(self) -> int:
        return len(self.operators)
