"""The planning problem: units to be placed on the devices of a cluster, and their costs there.

All partitioners see the model through this one object, so that none of them counts differently from another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from lightning_gpp.cluster import Cluster
from lightning_gpp.costs.model import CostModel, Footprint, held_copies, rerun_seconds
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.plan import STEP
from lightning_gpp.planning.assignment.assign import assign
from lightning_gpp.planning.assignment.modules import RerunBlock, blocks_of, operators_of
from lightning_gpp.planning.problem.units import UnitGraph
from lightning_gpp.simulation import WeightCopies

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Seconds of all units, by unit, for one micro-batch share on one kind of device."""

    forward: Array
    input_gradient: Array
    weight_gradient: Array

    @property
    def total(self) -> Array:
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """Figures of blocks for a share of a micro-batch: seconds of their forwards, and bytes (see `RerunBlock`)."""

    seconds: Array
    freed: Array
    saved: Array

    def of(self, numbers: NDArray[np.int64]) -> BlockFigures:
        """The figures of some blocks."""
        return BlockFigures(self.seconds[numbers], self.freed[numbers], self.saved[numbers])


@dataclass(kw_only=True, eq=False)
class Problem:
    """Units, devices, and a partitioner's choices. Arguments that are not described are those of `planning.Request`.

    Args:
        graph: the captured operators.
        costs: seconds of operators.
        units: pieces that are never divided.
        cluster: devices and links.
        batch_size: samples of the mini-batch.
        sizes: micro-batch sizes to choose from, ascending. If one does not divide the mini-batch, the last micro-batch
            is smaller; drafts are evaluated, and bounded, as if it were not.
        recompute: whether stages recompute their activations: None means as little as their memory requires.
        offload: whether stages keep activations in host memory: None means those that would not fit otherwise, where it
            takes less time than recomputation and the link to the host is known.
        sharding: what the replicas of a stage split: "auto" means as little as their memory requires.
        num_pipelines: pipelines like this one whose stages hold the same parameters.
        replicable: whether r equal replicas of every stage may be r pipeline replicas.
        num_slices: slices per sample, each of which counts as a sample of the mini-batch; a pipeline gets all slices of
            one.
        single_step: the user's step has to run on one device, so a last stage with replicas gives it to a stage of its
            own.
    """

    graph: OperatorGraph
    costs: CostModel
    units: UnitGraph
    cluster: Cluster
    batch_size: int
    sizes: tuple[int, ...]
    schedules: tuple[str, ...] = ("1f1b",)
    footprint: Footprint = field(default_factory=Footprint)
    recompute: bool | None = None
    offload: bool | None = False
    sharding: str = "none"
    num_pipelines: int = 1
    max_replicas: float = inf
    replicable: bool = True
    weight_copies: WeightCopies | None = None
    num_slices: int = 1
    idle_devices: bool = False
    every_device: bool = False
    simplicity: float = 0.0
    slack: bool = True
    single_step: bool = True
    _seconds: dict[tuple[int, int], UnitSeconds] = field(default_factory=dict, init=False)
    _saved: dict[int, Array] = field(default_factory=dict, init=False)
    _blocks: dict[tuple[int, int], BlockFigures] = field(default_factory=dict, init=False)

    @property
    def continuous(self) -> bool:
        """True if the pipeline does not flush."""
        return self.weight_copies is not None

    @property
    def uniform(self) -> bool:
        """True if it makes no difference which devices a stage has."""
        return len(self.cluster.levels) < 2 and self.cluster.homogeneous and not self.cluster.links

    @property
    def num_units(self) -> int:
        return len(self.units.units)

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    def seconds(self, num_samples: int, kind: int = 0) -> UnitSeconds:
        """Seconds of every unit for `num_samples` samples on devices of a kind (an index into `cluster.kinds`)."""
        key = num_samples, kind
        if key not in self._seconds:
            self._seconds[key] = self._unit_seconds(num_samples, kind)
        return self._seconds[key]

    def saved_bytes(self, num_samples: int) -> Array:
        """Bytes that autograd saves in every unit for `num_samples` samples."""
        if num_samples not in self._saved:
            units = self.units.units
            self._saved[num_samples] = np.array([unit.saved_bytes.at(num_samples) for unit in units], dtype=float)
        return self._saved[num_samples]

    def copies(self, num_replicas: int, sharding: str | None = None) -> float:
        """Bytes that a replica holds per byte of weights; by default with as much sharding as the problem allows.

        With `fsdp`, a device with one stage holds its parameters, and in training its gradients, undivided besides.
        """
        sharding = sharding or ("zero1" if self.sharding == "auto" else self.sharding)
        number = num_replicas * self.num_pipelines
        undivided = 1 + self.footprint.training if sharding == "fsdp" and number > 1 else 0
        return held_copies(self.footprint.copies, sharding, number) + undivided

    def static_bytes_of(self, num_replicas: int) -> Array:
        """Weights, gradients and optimizer state of every unit, on each of this number of replicas."""
        return self.parameter_bytes * self.copies(num_replicas)

    @cached_property
    def static_bytes(self) -> Array:
        """The same on a single replica."""
        return self.static_bytes_of(1)

    @cached_property
    def blocks(self) -> tuple[RerunBlock, ...]:
        """The modules that stages may recompute; none if stages are slices."""
        return blocks_of(self.graph) if self.footprint.training and self.num_slices == 1 else ()

    @cached_property
    def units_of_blocks(self) -> list[frozenset[int]]:
        """The units with the operators of every block."""
        units: dict[str, set[int]] = {}
        for index, unit in enumerate(self.units.units):
            for name in unit.operators:
                units.setdefault(name, set()).add(index)
        return [frozenset().union(*(units.get(name, ()) for name in block.operators)) for block in self.blocks]

    def numbers_of_blocks(self, paths: Iterable[str]) -> NDArray[np.int64]:
        """The numbers of blocks with these paths."""
        wanted = set(paths)
        found = [number for number, block in enumerate(self.blocks) if block.path in wanted]
        return np.array(found, dtype=np.int64)

    def block_figures(self, num_samples: int, kind: int = 0) -> BlockFigures:
        """The figures of all blocks for `num_samples` samples on devices of a kind."""
        key = num_samples, kind
        if key not in self._blocks:
            device, graph = self.cluster.kinds[kind], self.graph
            forwards = [
                rerun_seconds(self.costs, (graph[name] for name in block.operators), num_samples, device)
                for block in self.blocks
            ]
            freed = [block.freed(num_samples) for block in self.blocks]
            saved = [block.saved.at(num_samples) for block in self.blocks]
            self._blocks[key] = BlockFigures(*(np.array(column, dtype=float) for column in (forwards, freed, saved)))
        return self._blocks[key]

    @cached_property
    def parameter_bytes(self) -> Array:
        """Weights of every unit; its gradients take the same."""
        return np.array([unit.parameter_bytes for unit in self.units.units], dtype=float)

    @cached_property
    def memory_bytes(self) -> Array:
        """Memory of every device."""
        return np.array([device.memory_bytes for device in self.cluster.devices], dtype=float)

    @cached_property
    def data_bytes(self) -> Affine:
        """Bytes of the data that the network reads."""
        return self.graph.input_bytes

    @cached_property
    def step_bytes(self) -> Affine:
        """Bytes that autograd saves in the user's step, if that is a stage of its own."""
        modules = [[path for path in unit.modules if path != STEP] for unit in self.units.units]
        operators = operators_of(self.graph, assign(self.graph, [*modules, (STEP,)]), len(modules) + 1)
        return sum((operator.saved_bytes for operator in operators[-1]), Affine())

    @cached_property
    def order(self) -> nx.DiGraph:
        """The graph of units."""
        return self.units.graph()

    @cached_property
    def neighbours(self) -> tuple[list[int], list[int]]:
        """The units that each unit reads directly, and those that read it, as the bits of their numbers."""
        both = self.order.predecessors, self.order.successors
        before, after = ([sum(1 << other for other in of(unit)) for unit in range(self.num_units)] for of in both)
        return before, after

    @cached_property
    def flow_table(self) -> list[tuple[int, tuple[int, ...], tuple[float, float, float, float]]]:
        """Bytes per unit and set of readers: per sample and fixed, forward; per sample and fixed, backward."""
        sums: dict[tuple[int, tuple[int, ...]], Array] = {}
        for value in self.units.values:
            size = np.array([value.bytes.per_sample, value.bytes.fixed])
            both = np.concatenate([size, size if value.num_directions == 2 else np.zeros(2)])
            sums[value.src, value.dsts] = sums.get((value.src, value.dsts), np.zeros(4)) + both
        return [(src, dsts, tuple(map(float, size))) for (src, dsts), size in sums.items()]  # type: ignore[misc]

    def on(self, units: UnitGraph) -> Problem:
        """The same problem with other units."""
        return replace(self, units=units)

    @cached_property
    def _operators(self) -> tuple[list[Operator], NDArray[np.int64]]:
        """Operators and their units; several units may repeat one."""
        pairs = [(name, index) for index, unit in enumerate(self.units.units) for name in unit.operators]
        return [self.graph[name] for name, _ in pairs], np.array([index for _, index in pairs], dtype=np.int64)

    def _unit_seconds(self, num_samples: int, kind: int) -> UnitSeconds:
        device = self.cluster.kinds[kind]
        operators, units = self._operators
        costs = np.array([self.costs.seconds(operator, num_samples, device) for operator in operators]).reshape(-1, 3)
        columns = np.zeros((3, self.num_units))
        for column, seconds in zip(columns, costs.T, strict=True):
            np.add.at(column, units, seconds)
        return UnitSeconds(*columns)


def operator_seconds(graph: OperatorGraph, costs: CostModel, cluster: Cluster, num_samples: int) -> dict[str, float]:
    """Forward and backward seconds of every operator on the cluster's first kind of device."""
    return {operator.name: sum(costs.seconds(operator, num_samples, cluster.kinds[0])) for operator in graph}


# -- a lower bound on the step of every plan: devices can at most be busy all the time --------------------------------
# Every operator counts once, on the kind of device that takes the fewest device-seconds for it. Waiting, messages and
# memory are not part of the bound, so it holds under any schedule.


def busy_bound(problem: Problem) -> float:
    """Seconds of a step with all devices busy: no schedule beats it, with any number of stages per device."""
    names = dict.fromkeys(name for unit in problem.units.units for name in unit.operators)
    operators = [problem.graph[name] for name in names]
    largest = {-(-problem.batch_size // -(-problem.batch_size // size)) for size in problem.sizes}
    return min(_bound_of_size(problem, operators, size) for size in largest)


def _bound_of_size(problem: Problem, operators: Sequence[Operator], size: int) -> float:
    """Replicas that share a micro-batch take no less in total."""
    kinds = problem.cluster.kinds
    seconds = np.array([[sum(problem.costs.seconds(each, size, kind)) for each in operators] for kind in kinds])
    seconds = seconds[:, seconds.min(axis=0) > 0]
    fastest = seconds.min(axis=0)
    worth = 1 / (seconds / fastest).min(axis=1, initial=np.inf)  # of a device: that of the fastest for every operator
    num_fastest = sum(worth[problem.cluster.kind(device)] for device in range(problem.num_devices))
    return problem.batch_size / size * float(fastest.sum()) / float(num_fastest or 1.0)
