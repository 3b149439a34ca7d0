"""Common parts of the commands: problems with the choices that the GraphPipe paper left open, runs, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf, log

from lightning_gpp.cluster import Cluster, preset_cluster
from lightning_gpp.costs.model import Footprint, Roofline
from lightning_gpp.graph import Affine, OperatorGraph
from lightning_gpp.planning import Answer, Draft, Evaluator, Prediction, Problem, Request, SearchControl
from lightning_gpp.planning.problem.draft import realise
from lightning_gpp.planning.problem.partitioner import partitioner_of
from lightning_gpp.planning.problem.prediction import best_trial, predicted


def simulated(problem: Problem, draft: Draft) -> Prediction:
    """The prediction for the plan that a draft becomes."""
    plan, number = realise(problem, Evaluator(problem).fitted(draft))
    known = problem.graph, problem.cluster, problem.costs, problem.footprint, number
    return predicted(plan, *known, weight_copies=problem.weight_copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The properties of the machine that the paper leaves open.

    Args:
        flops: FLOP/s that a V100 reaches.
        seconds_per_operator: seconds to call an operator.
        network: bytes per second between nodes.
        shared: the sharing of the network; see `Link`.
        in_place: whether every device has its samples already, as in FlexFlow, whose random data are loaded once;
            otherwise the device of the user's step sends them, as in our runtime.
    """

    flops: float
    seconds_per_operator: float
    network: float
    shared: str = "node"
    in_place: bool = False

    def cluster(self, num_devices: int) -> Cluster:
        """Nodes of four V100 of 16 GB."""
        base = preset_cluster("summit", num_nodes=-(-num_devices // 4))
        device = replace(
            base.devices[0],
            peak_flops={"float32": self.flops},
            flops_efficiency=1.0,
            seconds_per_operator=self.seconds_per_operator,
        )
        inside, *between = base.levels
        slower = [
            replace(level, link=replace(level.link, bytes_per_second=self.network, shared=self.shared))
            for level in between
        ]
        return replace(base, devices=(device,) * base.num_devices, levels=(inside, *slower)).subset(range(num_devices))

    def problem(self, graph: OperatorGraph, num_devices: int, batch_size: int, num_pieces: float = inf) -> Problem:
        """The problem on this number of devices; see `problem_on`."""
        return problem_on(graph, self.cluster(num_devices), batch_size, num_pieces, in_place=self.in_place)


def powers_of_two(batch_size: int) -> tuple[int, ...]:
    """Micro-batch sizes that the paper searches and that divide the mini-batch."""
    return tuple(1 << power for power in range(batch_size.bit_length()) if batch_size % (1 << power) == 0)


def problem_on(
    graph: OperatorGraph, cluster: Cluster, batch_size: int, num_pieces: float = inf, *, in_place: bool = False
) -> Problem:
    """A problem as in the paper: float32, SGD, no recomputation, micro-batches of a power of two samples."""
    request = Request(
        cluster=cluster,
        batch_size=batch_size,
        costs=Roofline(graph),
        footprint=Footprint(optimizer="sgd"),
        idle_devices=False,
        recompute=False,
        num_pieces=num_pieces,
    )
    problem = request.problem(without_data(graph) if in_place else graph)
    return replace(problem, sizes=powers_of_two(batch_size))


def without_data(graph: OperatorGraph) -> OperatorGraph:
    """The same operators with samples of 0 bytes; costs need the graph with its data."""
    return graph.with_operators(
        replace(operator, outputs=tuple(replace(spec, shape=(*spec.shape, Affine())) for spec in operator.outputs))
        for operator in graph
        if operator.target == "input"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A search and the prediction for its plan; None if there is no plan, for reasons in `answer.notes`."""

    answer: Answer
    seconds: float
    prediction: Prediction | None

    @property
    def samples_per_second(self) -> float:
        return self.prediction.samples_per_second if self.prediction else 0.0

    def __str__(self) -> str:
        """Pipelines if there are several; stages, depth, samples of a micro-batch."""
        if self.prediction is None:
            return "-"
        plan, number = self.prediction.plan, self.prediction.num_pipelines
        pipelines = f"{number} x " if number > 1 else ""
        return f"{pipelines}{len(plan.stages)}, {plan.depth}, {plan.stages[-1].micro_batch_size}"


def run(partitioner: str, problem: Problem, seconds: float = 10.0) -> Run:
    """Search, and simulate the program of the plan; `seconds` limit searches that can stop at any time."""
    answer, elapsed = search(partitioner, problem, seconds)
    if answer.draft is None:
        return Run(answer=answer, seconds=elapsed, prediction=None)
    _, prediction = best_trial(problem, answer, partial(simulated, problem), SearchControl(seconds=seconds))
    return Run(answer=answer, seconds=elapsed, prediction=prediction)


def search(partitioner: str, problem: Problem, seconds: float = 10.0) -> tuple[Answer, float]:
    """The answer, and the seconds of the search."""
    control = SearchControl(seconds=seconds)
    return partitioner_of(partitioner)(problem, control), control.elapsed


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def typical_deviation(values: Iterable[float], others: Iterable[float]) -> float:
    """Root mean square of the logarithms of ratios, as a factor minus 1."""
    squares = [log(value / other) ** 2 for value, other in zip(values, others, strict=True)]
    return exp((sum(squares) / len(squares)) ** 0.5) - 1


def verdict(met: bool) -> str:
    return "met" if met else "NOT met"
