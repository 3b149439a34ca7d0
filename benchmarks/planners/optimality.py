"""Quality of the partitioners on problems whose best answer can be found by trying everything.

    python -m benchmarks.planners.optimality [--problems 500] [--seconds 10]

The random problems are those of the tests: directed acyclic graphs of 3 to 6 units on 2 to 4 devices, some with too
little memory, some on two nodes. Run it from the repository's root.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from random import Random

from benchmarks.planners.common import search, table, verdict
from lightning_gpp.planning import Evaluation, Evaluator
from lightning_gpp.planning.partitioners.graphpipe.search import PRECISION
from lightning_gpp.schedules.one_f_one_b import samples_in_flight
from tests.planning.brute_force import best_of_all
from tests.planning.problems import random_problem
from tests.planning.test_graphpipe import Judge, trees_of
from tests.planning.test_graphpipe import random_problem as random_series_parallel

SAME = 1e-6
"""Relative difference up to which two steps count as equal."""

OPTIMAL, WORST = 0.99, 1.02
"""Share of problems, and ratio to the best plan."""


def against_all_plans(number: int, seconds: float) -> Iterator[str]:
    """Compare `auto` with the best of all plans, by the simulated step."""
    ratios: list[float] = []
    took = 0.0
    hopeless = agreed = 0
    for seed in range(number):
        problem = random_problem(seed)
        answer, elapsed = search("auto", problem, seconds)
        took += elapsed
        everything = best_of_all(problem)
        best, ours = _seconds(everything), inf if answer.draft is None else _seconds(Evaluator(problem)(answer.draft))
        if best == inf:
            hopeless, agreed = hopeless + 1, agreed + (ours == inf)
        else:
            ratios.append(ours / best)
    optimal = sum(ratio < 1 + SAME for ratio in ratios)
    header = ["problems", "with a plan", "auto is optimal", "worst ratio", "auto, s"]
    row = [number, len(ratios), f"{optimal} ({optimal / len(ratios):.1%})", f"{max(ratios):.4f}"]
    yield table(header, [[*row, f"{took:.0f}"]])
    yield (
        f"\nOptimal in at least {OPTIMAL:.0%}, never more than {WORST - 1:.0%} worse: "
        f"{verdict(optimal >= OPTIMAL * len(ratios) and max(ratios) <= WORST)}; no plan where there is none: "
        f"{agreed} of {hopeless}, {verdict(agreed == hopeless)}."
    )


def _seconds(evaluation: Evaluation) -> float:
    """Step time; infinite if the plan does not fit."""
    return evaluation.seconds if evaluation.fits else inf


def graphpipe_in_its_space(number: int, seconds: float) -> Iterator[str]:
    """Compare GraphPipe's bottleneck with that of the best of all strategies of its space, by plain loops.

    If there are many branches, there are several orders of the units, with branches in bundles. They compete by the
    simulated step, so the answer has to be the best one of any of the orders.
    """
    ratios: list[float] = []
    bundled = refused = wrong = num_strategies = 0
    for seed in range(1000, 1000 + number):
        problem, _ = random_series_parallel(seed)
        judge, trees = Judge(problem, problem.sizes[0]), trees_of(problem)
        known = [[value for value, *_ in judge.strategies(tree)] for tree in trees]
        best = [min(values) for values in known if values and min(values) < inf]
        answer = search("graphpipe", problem)[0]
        bundled, num_strategies = bundled + (len(trees) > 1), num_strategies + sum(map(len, known))
        refused += bool(best) and answer.draft is None
        wrong += not best and answer.draft is not None
        if best and answer.draft is not None:
            ratios.append(_least_above(answer.objective, best))
    header = ["problems", "with bundles", "answers", "refused with a strategy", "answers without one"]
    header += ["strategies tried", "worst ratio of bottlenecks"]
    yield table(header, [[number, bundled, len(ratios), refused, wrong, f"{num_strategies:,}", f"{max(ratios):.5f}"]])
    met = min(ratios) >= 1 - SAME and max(ratios) <= (1 + PRECISION) * (1 + SAME)
    yield (
        f"\nWithin the thousandth that it searches to, of the best strategy of an order: {verdict(met)} in "
        f"{len(ratios)} answers; an answer if and only if there is a strategy: {verdict(not refused and not wrong)}."
    )


def _least_above(found: float, best: Sequence[float]) -> float:
    """The ratio to the largest of the values that it is not below; if it is below all, to the least."""
    return found / max((value for value in best if found >= value * (1 - SAME)), default=min(best))


def fewest_in_flight(number: int, seconds: float) -> Iterator[str]:
    """Compare our warm-ups with the fewest for which a balanced step is as short as without any limit."""
    rows = []
    for name, ratio in (("backwards as long as forwards", 1), ("backwards twice as long", 2)):
        random = Random(0)
        graphs = [random_graph(random) for _ in range(number)]
        equal = sum(_agrees([1] * len(graph), graph, ratio) for graph in graphs)
        rows.append([f"{number} random graphs, 2 to 5 stages, {name}", f"{equal / number:.1%}"])
    yield table(["stages", "the rule has the fewest samples in flight, all stages together"], rows)
    chain = [[1], [2], []]
    uniform, own = samples_in_flight([4, 4, 4], chain), samples_in_flight([1, 2, 4], chain)
    least = [fewest(sizes, chain, 1, 24)[0] for sizes in ([4, 4, 4], [1, 2, 4])]
    yield (
        f"\nFigure 5 of the GraphPipe paper: the first of three stages holds {uniform[0]} samples with micro-batches "
        f"of 4, {own[0]} with micro-batches of 1, 2 and 4; by trying all: {least[0]} and {least[1]}. "
        f"12 to 10: {verdict([uniform[0], own[0], *least] == [12, 10, 12, 10])}."
    )


def _agrees(sizes: Sequence[int], successors: Sequence[Sequence[int]], ratio: float) -> bool:
    return sum(samples_in_flight(sizes, successors)) == sum(fewest(sizes, successors, ratio, 3 * len(sizes)))


def random_graph(random: Random) -> list[list[int]]:
    """Successors of every stage; the last stage is the only sink."""
    number = random.randint(2, 5)
    return [
        sorted(random.sample(range(stage + 1, number), k=random.randint(1, min(2, number - stage - 1))))
        if stage < number - 1
        else []
        for stage in range(number)
    ]


def fewest(sizes: Sequence[int], successors: Sequence[Sequence[int]], ratio: float, batch_size: int) -> list[int]:
    """The warm-ups, in samples, with the least sum for which the step is as short as without a limit.

    All warm-ups are tried, up to one micro-batch more than the rule's on every stage.
    """
    rule = samples_in_flight(sizes, successors)
    shortest = step_seconds(sizes, successors, [batch_size] * len(sizes), ratio, batch_size)
    choices = [range(size, most + size + 1, size) for size, most in zip(sizes, rule, strict=True)]
    for warm_ups in sorted(product(*choices), key=sum):
        if step_seconds(sizes, successors, warm_ups, ratio, batch_size) <= shortest * (1 + 1e-9):
            return list(warm_ups)
    return [batch_size] * len(sizes)


def step_seconds(
    sizes: Sequence[int], successors: Sequence[Sequence[int]], warm_ups: Sequence[int], ratio: float, batch_size: int
) -> float:
    """Step time of 1F1B in plain loops: on every stage a sample takes 1 second forward and `ratio` seconds back.

    Messages take no time. Infinite if the stages deadlock.
    """
    stages = range(len(sizes))
    predecessors = [[src for src in stages if stage in successors[src]] for stage in stages]
    orders = [_order(size, warm_up, batch_size) for size, warm_up in zip(sizes, warm_ups, strict=True)]
    ends: list[tuple[list[float], list[float]]] = [([], []) for _ in stages]  # of forwards and of backwards
    clock, waiting = [0.0] * len(sizes), set(stages)
    while waiting:
        stage = waiting.pop()
        for back in orders[stage][sum(map(len, ends[stage])) :]:
            samples = (len(ends[stage][back]) + 1) * sizes[stage]
            others = successors[stage] if back else predecessors[stage]
            ready = max((_when(ends[other][back], sizes[other], samples) for other in others), default=0.0)
            if ready == inf:
                break
            clock[stage] = max(clock[stage], ready) + sizes[stage] * (ratio if back else 1)
            ends[stage][back].append(clock[stage])
            waiting.update(predecessors[stage] if back else successors[stage])
    complete = all(len(backwards) * size == batch_size for (_, backwards), size in zip(ends, sizes, strict=True))
    return max(clock) if complete else inf


def _order(size: int, warm_up: int, batch_size: int) -> list[bool]:
    """Flags of backwards in a stage's order: warm-up forwards, one backward and one forward in turn, backwards."""
    number, first = batch_size // size, min(warm_up, batch_size) // size
    return [False] * first + [True, False] * (number - first) + [True] * first


def _when(ends: Sequence[float], size: int, samples: int) -> float:
    """Time at which a stage has processed this many samples; infinite if it has not yet."""
    needed = -(-samples // size)
    return ends[needed - 1] if needed <= len(ends) else inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500, help="random ones in each section")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a search of auto at most")
    options = parser.parse_args()
    for title, section in (
        ("auto against all plans", against_all_plans),
        ("graphpipe against all strategies of its space", graphpipe_in_its_space),
        ("Fewest micro-batches in flight", fewest_in_flight),
    ):
        print(f"\n### {title}\n", *section(options.problems, options.seconds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
