"""Piper's released planner, our search with its costs, and `auto` in its objective, on inputs in its format.

    git clone https://github.com/msr-fiddle/piper
    python -m benchmarks.planners.released_piper piper/inputs [--auto 10]

`RELEASED` has the answers of the release (commit d7fc8cf, g++ -O3), without tensor parallelism, which the runs of this
library do not have, and with links of 25 GiB/s. Its objective are the seconds per micro-batch of the slowest stage;
replicas take micro-batches in turn, and each layer keeps its activations or recomputes them.

`auto` gets the same layers, with the activations that are recomputed, and Piper's micro-batches as samples. It searches
three times: for Piper's objective (`as_released`), which is a pipeline without a flush, messages that take the time of
devices, a parameter server, and a message of its own for every edge; for the shortest step; and for the shortest period
without a flush, both on links that overlap with computing. The stages of its first plan are judged by Piper's
objective, with Piper's memory, and those of Piper's plan by this library's estimates, with the micro-batches with which
they are fastest: replicas share each. "released, here" is Piper's objective with this library's memory. In steps and
periods device 0 also holds the mini-batch, which Piper does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, lcm
from pathlib import Path
from typing import Any, Final

import networkx as nx
import numpy as np

from benchmarks.planners.common import table
from benchmarks.planners.layer_costs import LayerCosts, LayerProfile
from benchmarks.planners.piper_profile import read_profile, unique_names
from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.costs.measured import CostTable, OperatorSeconds
from lightning_gpp.costs.model import Footprint
from lightning_gpp.errors import PlanError
from lightning_gpp.files import read_json
from lightning_gpp.graph import Affine, Operator, OperatorGraph, TensorSpec
from lightning_gpp.planning import DraftStage, Request, best_plan
from lightning_gpp.planning.assignment.modules import DATA
from lightning_gpp.planning.partitioners.piper import (
    MAX_DOWNSETS,
    Border,
    DownsetSearch,
    FirstStage,
    downsets,
    members_of,
)
from lightning_gpp.planning.problem.draft import Draft, side_by_side
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import SearchControl, partitioner_of
from lightning_gpp.planning.problem.units import Value
from lightning_gpp.simulation import no_copies

BYTES_PER_SECOND: Final = 25 * 2**30

LOADER: Final = "loader"
NOTHING: Final = TensorSpec(shape=(Affine(1, 0), Affine(0, 0)), dtype="float32")

VANILLA: Final = "1"
"""The key of a layer's modes without tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Case:
    """An input on a number of devices with so many GiB, and the micro-batches of a mini-batch; 0: those of the file."""

    file: str
    num_devices: int
    gibibytes: float
    num_micro_batches: int = 0


RELEASED: Final[Mapping[Case, tuple[float, float]]] = {
    Case("bert32a100.json", 8, 2, 480): (inf, 0.014),
    Case("bert32a100.json", 8, 8, 480): (0.16585575, 0.015),
    Case("bert32a100.json", 8, 80, 480): (0.123205077, 0.017),
    Case("bert32a100.json", 16, 2, 480): (inf, 0.021),
    Case("bert32a100.json", 16, 8, 480): (0.0830652428, 0.023),
    Case("bert32a100.json", 16, 80, 480): (0.0625151544, 0.031),
    Case("bert32a100.json", 32, 2, 480): (inf, 0.030),
    Case("bert32a100.json", 32, 8, 480): (0.0416699893, 0.034),
    Case("bert32a100.json", 32, 80, 480): (0.0321701928, 0.047),
    Case("bert32a100.json", 64, 2, 480): (0.0443471971, 0.051),
    Case("bert32a100.json", 64, 8, 480): (0.0203035762, 0.058),
    Case("bert32a100.json", 64, 80, 480): (0.0169852405, 0.090),
    Case("gnmt.json", 2, 3.5): (260.226823, 140.7),
    Case("resnet.json", 8, 4): (73.493286, 2.081),
    Case("resnet.json", 16, 2): (76.5213125, 3.117),
    Case("resnet.json", 32, 1.5): (50.9771953, 4.536),
    Case("resnet.json", 32, 16): (14.639429, 6.033),
    Case("resnet.json", 64, 1): (inf, 5.938),
    Case("resnet.json", 64, 4): (8.66677285, 6.503),
}
"""Seconds per micro-batch of the slowest stage (infinite: no plan fits), and CPU seconds of the search.

BERT's times are seconds, the others' milliseconds, but all are added to seconds of communication as they are.
"""


@dataclass(frozen=True, slots=True)
class Profile:
    """A file in Piper's format: layers without tensor parallelism, and the bytes on its edges."""

    layers: LayerProfile
    carried: tuple[Value, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, content: Mapping[str, Any], case: Case) -> Profile:
        nodes = content["nodes"]
        position = {node["id"]: index for index, node in enumerate(nodes)}
        keeping, recomputing = zip(*(_modes(node) for node in nodes), strict=True)
        seconds, kept, fixed = (
            np.array([[mode[key] for mode in modes] for modes in (keeping, recomputing)], dtype=float)
            for key in ("timePerSample", "memoryUsageA", "memoryUsageB")
        )
        layers = LayerProfile(
            seconds=seconds,
            kept=kept,
            fixed=fixed,
            parameters=np.array([mode["parameterSize"] for mode in keeping], dtype=float),
            memory=case.gibibytes * 2**30,
            bytes_per_second=BYTES_PER_SECOND,
            num_micro_batches=case.num_micro_batches or content["mbsInBatch"],
        )
        carried = tuple(
            Value(
                src=position[edge["sourceId"]],
                dsts=(position[edge["destId"]],),
                bytes=Affine(edge["communicationCost"]),
            )
            for edge in content["edges"]
        )
        names = unique_names({node["id"]: str(node.get("name", f"node{node['id']}")) for node in nodes})
        return cls(layers, carried, tuple(names[node["id"]] for node in nodes))

    @property
    def order(self) -> nx.DiGraph:
        """The graph of layers."""
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(self.names)))
        graph.add_edges_from((entry.src, dst) for entry in self.carried for dst in entry.dsts)
        return graph


def _modes(node: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    modes = node["TMPCs"][VANILLA]
    return modes[0], modes[-1]


def optimum(profile: Profile, num_devices: int) -> tuple[float, list[FirstStage]]:
    """Piper's objective of the best plan, and its stages; infinite and none if no plan fits."""
    found = downsets(profile.order, MAX_DOWNSETS)
    members = members_of(found, len(profile.names))
    costs = LayerCosts(profile.layers, members, num_devices)
    search = DownsetSearch(members, Border(profile.carried, members), [costs], num_devices, idle=True)
    for index in range(1, len(members)):
        search.fill(index)
    seconds = search.seconds(0)
    return seconds, list(search.stages(0)) if seconds < inf else []


def objective(profile: Profile, stages: Sequence[tuple[frozenset[int], int]]) -> float:
    """Piper's objective of given stages, as layers and replicas, first to last; infinite if they do not fit."""
    members = np.zeros((len(stages) + 1, len(profile.names)), dtype=bool)
    for index, (units, _) in enumerate(reversed(stages), start=1):
        members[index] = members[index - 1]
        members[index, list(units)] = True
    border, worst, devices = Border(profile.carried, members), 0.0, 0
    for index, (_, replicas) in enumerate(reversed(stages), start=1):
        devices += replicas
        costs, rest = LayerCosts(profile.layers, members, devices), np.array([index - 1])
        fitting = {entry.replicas: entry for entry in costs.stages(index, rest, border(index, rest))}
        found = fitting.get(replicas)
        worst = max(worst, float(found.seconds[0, -1]) if found and len(found.seconds) else inf)
    return worst


def question(path: Path, profile: Profile, case: Case, seconds: float) -> tuple[OperatorGraph, Request]:
    """The layers of a case, and what is asked about them."""
    graph, costs = read_profile(path, time_unit=1.0)
    memory = int(case.gibibytes * 2**30)
    device = Device(name="device", memory_bytes=memory, peak_flops={"float32": 1.0}, peak_bytes_per_second=1.0)
    return graph, Request(
        cluster=Cluster.uniform(device, case.num_devices, Link(bytes_per_second=BYTES_PER_SECOND)),
        batch_size=profile.layers.num_micro_batches,
        costs=costs,
        footprint=Footprint(optimizer="sgd"),
        idle_devices=True,
        seconds=seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServer(Cluster):
    """A cluster that sums gradients as Piper assumes: 4(n - 1)/n of the bytes pass one link."""

    def all_reduce_seconds(self, devices: Sequence[int], num_bytes: float) -> float:
        """See `Cluster`."""
        number = len(devices)
        return 4 * (number - 1) / number * num_bytes / BYTES_PER_SECOND


def as_released(graph: OperatorGraph, request: Request) -> tuple[OperatorGraph, Request]:
    """The question of the release: its objective, with layers for the data, and one message for each edge."""
    link = Link(bytes_per_second=BYTES_PER_SECOND, overlap=False)
    cluster = ParameterServer.uniform(request.cluster.devices[0], request.cluster.num_devices, link)
    costs = CostTable(name="released", operators={**request.costs.operators, LOADER: OperatorSeconds()})
    changes: dict[str, Any] = {"weight_copies": no_copies, "simplicity": 0.0, "costs": costs}
    return with_edges_apart(graph), replace(request, cluster=cluster, **changes)


def with_edges_apart(graph: OperatorGraph) -> OperatorGraph:
    """The graph with a value and a gradient of it for every edge, and with layers in place of data."""
    made = OperatorGraph(parameter_bytes={**graph.parameter_bytes}, parameter_sizes={**graph.parameter_sizes})
    made.add(Operator(name=LOADER, target="input", module=DATA, outputs=(NOTHING,)))
    for operator in graph:
        outputs = tuple(replace(spec, requires_grad=True) for spec in operator.outputs)
        changed = replace(operator, outputs=outputs * max(1, graph.nx.out_degree(operator.name)))
        is_layer = operator.target == "input" and any(spec.bytes(1) for spec in outputs)
        if is_layer:
            own = f"{operator.name}.weight"  # so that no stage has a copy of the layer
            made.parameter_bytes[own] = made.parameter_sizes[own] = 0
            changed = replace(changed, target="profiled", module=operator.name, parameters=(own,))
        made.add(changed)
        if is_layer:
            made.connect(LOADER, operator.name, 0)
    for name in graph.nx:
        for number, reader in enumerate(graph.nx.successors(name)):
            made.connect(name, reader, number)
    return made


def estimated(graph: OperatorGraph, request: Request, profile: Profile, stages: Sequence[FirstStage]) -> float:
    """Seconds per micro-batch of Piper's stages in a step of this library; infinite if no micro-batch size fits."""
    problem, number = request.problem(graph), request.batch_size
    owner = {name: index for index, stage in enumerate(stages) for name in (profile.names[u] for u in stage.units)}
    groups: list[list[int]] = [[] for _ in stages]
    for unit, entry in enumerate(problem.units.units):
        groups[max((owner[name] for name in entry.operators if name in owner), default=len(stages) - 1)].append(unit)
    filled = [(tuple(group), stage.replicas) for group, stage in zip(groups, stages, strict=True) if group]
    devices = side_by_side([replicas for _, replicas in filled])
    evaluate, shared = Evaluator(problem), lcm(*(replicas for _, replicas in filled))
    found = [inf]
    for size in {*problem.sizes, *(size for size in range(shared, number + 1, shared) if number % size == 0)}:
        parts = zip(filled, devices, strict=True)
        draft = Draft(stages=tuple(DraftStage(units=u, devices=d, micro_batch_size=size) for (u, _), d in parts))
        outcome = evaluate(draft)
        found += [outcome.seconds / number] if outcome.fits else []
    return min(found)


def searched(graph: OperatorGraph, request: Request, profile: Profile) -> tuple[float, float]:
    """Piper's objective of the plan that the search of `auto` finds, without programs, and its CPU seconds."""
    began = time.process_time()
    problem = request.problem(graph)
    draft = partitioner_of("auto")(problem, SearchControl(seconds=request.seconds)).draft
    took = time.process_time() - began
    if draft is None or not Evaluator(problem)(draft).fits:
        return inf, took
    return objective(profile, list(_layers(graph, request, profile, draft.stages))), took


def simulated(graph: OperatorGraph, request: Request) -> float:
    """Simulated seconds per micro-batch of `auto`'s plan; infinite if there is none that fits."""
    try:
        return 1 / best_plan("auto", graph, request).samples_per_second
    except PlanError:
        return inf


def _layers(
    graph: OperatorGraph, request: Request, profile: Profile, stages: Sequence[DraftStage]
) -> Iterator[tuple[frozenset[int], int]]:
    """The layers and replicas of stages, first to last."""
    position = {name: index for index, name in enumerate(profile.names)}
    units = request.problem(graph).units.units
    order = {name: index for index, name in enumerate(nx.topological_sort(graph.nx))}
    chain = sorted(stages, key=lambda stage: max(order[n] for u in stage.units for n in units[u].operators))
    names = [{name for unit in stage.units for name in units[unit].operators} for stage in chain]
    layers = [{position[name] for name in held if name in position} for held in names]
    for source in set(position.values()).difference(*layers):  # data: a stage that reads them first
        readers = set(profile.order.successors(source))
        next(held for held in layers if not readers.isdisjoint(held)).add(source)
    for held, stage in zip(layers, chain, strict=True):
        yield frozenset(held), len(stage.devices)


def row(folder: Path, case: Case, seconds: float) -> list[object]:
    path = folder / case.file
    content = read_json(path, error=PlanError)
    profile = Profile.of(content, case)
    began = time.process_time()
    ours, stages = optimum(profile, case.num_devices)
    took = time.process_time() - began
    released, theirs = RELEASED[case]
    beside = [shown(value) for value in (released, ours)]
    line: list[object] = [case.file, case.num_devices, case.gibibytes, profile.layers.num_micro_batches, *beside]
    line += [len(stages) or "-", f"{theirs:.2f} s", f"{took:.2f} s"]
    if seconds:
        graph, request = question(path, profile, case, seconds)
        asked = as_released(graph, request)
        judged, seconds_taken = searched(*asked, profile)
        here = estimated(*asked, profile, stages) if stages else inf
        line += [shown(here), shown(judged), f"{seconds_taken:.1f} s", shown(simulated(graph, request))]
        line.append(shown(estimated(graph, request, profile, stages)) if stages else "none")
        without = replace(request, weight_copies=no_copies)
        line.append(shown(simulated(graph, without)))
        line.append(shown(estimated(graph, without, profile, stages)) if stages else "none")
    return line


def shown(value: float) -> str:
    return "none" if value == inf else f"{value:.6g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="inputs of Piper's repository")
    parser.add_argument("--auto", type=float, default=0.0, metavar="SECONDS", help="search with auto, too")
    options = parser.parse_args()
    header = ["input", "devices", "GiB", "micro-batches", "released", "ours", "stages", "released takes", "ours takes"]
    more = ["released, here", "auto", "auto takes"]
    more += ["auto, step", "released, step", "auto, period", "released, period"]
    header += more if options.auto else []
    cases = [case for case in RELEASED if (options.folder / case.file).exists()]
    print(table(header, [row(options.folder, case, options.auto) for case in cases]))


if __name__ == "__main__":
    main()
