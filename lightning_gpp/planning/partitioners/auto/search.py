"""The default partitioner: any DAG, any stages, replicas, micro-batch size and schedule, jointly.

First shapes are contiguous cuts of two orders of the units (`seeds`), and the draft of GraphPipe's dynamic program.
The best ones are improved by single changes (`moves`) as long as the step gets shorter. Then the best
of all is perturbed and improved again, until the search is over, there was no improvement for long, or the step is as
short as the lower bound (`bound`) allows. Every shape is judged by the simulated seconds of its whole step and by the
memory of every device, with the cheapest measures that make it fit (`Evaluator.fitted`).

Of those that are nearly as fast as the best, the simplest one is the answer (`Problem.simplicity`).

Fewer devices may be faster: if the problem allows idle ones, moves release and take devices. If no draft uses all
devices, as of a model that cannot be cut into that many stages, nor each micro-batch shared, the answer is one on
fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nsmallest
from math import inf
from random import Random

from lightning_gpp.planning.partitioners.auto.coarse import coarse
from lightning_gpp.planning.partitioners.auto.moves import moves, with_slack
from lightning_gpp.planning.partitioners.auto.seeds import MAX_SLOTS, Cuts, orders, seeds
from lightning_gpp.planning.partitioners.auto.shape import Shape
from lightning_gpp.planning.partitioners.auto.variants import on_fewer_devices, variants
from lightning_gpp.planning.partitioners.graphpipe import graphpipe
from lightning_gpp.planning.problem.draft import Draft, complexity
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import Alternative, Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.pipeline_clock import EXACT_ACTIONS
from lightning_gpp.planning.problem.problem import Problem, busy_bound

MIN_PIECES, PIECES_PER_SLOT, COARSE_SHARE = 192, 3, 0.7
"""Number of larger units for a first search, in total and per device, and its share of the time."""

PATIENCE = 150
"""The search ends after this many perturbations in a row without improvement."""

FIRST_SHARE = 0.15
"""Share of the time for finding first shapes; as much again for slack in the best ones."""

GRAPHPIPE_SHARE, GRAPHPIPE_UNITS = 0.15, 300
"""Share of the search for GraphPipe's dynamic program, and the most units for which it is quick."""

NUM_STARTS = 6
"""Number of shapes that are improved."""

IMPROVE_SHARE = 0.9
"""Share of the search for the fastest shape; the rest is for simpler ones."""

FEWER_SHARE = 0.1
"""Share of the search for first shapes on fewer devices."""

EVALUATIONS_PER_ACTION = 0.01
"""The share of an evaluation that simulating one action takes as long as."""

GOOD_ENOUGH = 1.002
"""Multiple of the lower bound at which the search ends, because little is left to be gained."""

NEARLY = 1.1
"""Multiple of the wanted time below which shapes with fewer stages are improved to reach it."""

MAX_MOVES = 500
"""Most moves that are rated to improve a draft by its program: the last ones, which change no stage's units."""

NUM_SLACKENED = 100
"""Number of first shapes that are judged with slack, too."""

INTERRUPTED = "The search was interrupted; this is the best plan so far."

NUM_ALTERNATIVES = 6
"""Number of kinds of shapes, the best one's included, of which the best is an alternative."""

Rank = tuple[float, float]

_Kind = tuple[int, int, int]
"""Micro-batch size, number of stages and number of devices."""


@register_partitioner("auto")
def auto(problem: Problem, control: SearchControl) -> Answer:
    """Find the shortest step in `control.seconds`; a good plan takes a fraction of that."""
    search = Search(problem, control.part(IMPROVE_SHARE), busy_bound(problem))
    try:
        search.run(_first_results(search))
        search.control = control
        search.simplify()
        search.save()
        if not search.found and not (problem.idle_devices or problem.every_device):
            return auto(replace(problem, idle_devices=True), control)
        return search.answer()
    except KeyboardInterrupt:
        return replace(search.answer(), notes=(INTERRUPTED,), interrupted=True)


def _first_results(search: Search) -> list[Shape]:
    """The results of a search on larger units, if there are many units."""
    problem, control = search.problem, search.control
    num_pieces = max(MIN_PIECES, PIECES_PER_SLOT * min(problem.num_devices, MAX_SLOTS))
    if problem.num_units < 1.5 * num_pieces:
        return []
    coarser = coarse(problem, num_pieces)
    first = Search(coarser.problem, control.part(COARSE_SHARE), search.bound)
    try:
        first.run()
    finally:
        search.kept = [coarser.refined(shape) for shape in first.kept]
        search.take([*search.kept, *map(coarser.refined, first.leaders())])
    return search.leaders()


@dataclass(slots=True)
class Search:
    """The state of one search: the ranks of shapes, and the best shape.

    `refused` are shapes that are no better than the one they were made from; `kept` are those that are alternatives in
    any case; `fastest` is the best shape before simpler ones were preferred.
    """

    problem: Problem
    control: SearchControl
    bound: float
    evaluate: Evaluator = field(init=False)
    known: dict[Shape, Rank] = field(default_factory=dict)
    refused: set[Shape] = field(default_factory=set)
    kept: list[Shape] = field(default_factory=list)
    best: Shape | None = None
    rank: Rank = (inf, inf)
    fastest: Shape | None = None

    def __post_init__(self) -> None:
        self.evaluate = Evaluator(self.problem)

    def take(self, shapes: Iterable[Shape]) -> None:
        """Judge shapes that were found elsewhere."""
        for shape in shapes:
            self._judge(shape)

    def leaders(self) -> list[Shape]:
        """The best shapes of different sizes and numbers of stages and devices, best first."""
        chosen: dict[tuple[int, int, int], Shape] = {}
        for shape in nsmallest(200, self.known, key=self.known.__getitem__):
            chosen.setdefault((shape.size, len(shape.groups), shape.num_devices), shape)
        return list(chosen.values())[:NUM_STARTS]

    @property
    def done(self) -> bool:
        good = self.fastest is None and self.rank[0] == 0 and self.rank[1] <= self.bound * GOOD_ENOUGH
        return good or self.control.expired

    @property
    def found(self) -> bool:
        """True if there is a draft, even if it does not fit the memory."""
        return self.best is not None and self.rank[1] < inf

    def run(self, starts: Sequence[Shape] = ()) -> None:
        """Improve the given shapes, or the best first ones; then perturb the best one and improve again."""
        for shape in starts or self._starts():
            if self.done:
                return
            self._improve(shape)
        random, failures = Random(0), 0
        while not self.done and self.best is not None and failures < PATIENCE:
            before = self.rank
            self._improve(self._disturbed(self.best, random))
            failures = 0 if self.rank < before else failures + 1

    def simplify(self) -> None:
        """Answer with the simplest shape that is nearly as fast as the fastest."""
        if self.best is None or self.rank[0] > 0 or not self.problem.simplicity:
            return
        self.fastest, limit = self.best, self.rank[1] * (1 + self.problem.simplicity)
        for shape in self._with_fewer_stages(len(self.best.groups), limit):
            self._improve(shape, limit)
        near = [shape for shape, rank in self.known.items() if rank <= (0, limit)]
        fewest = min(len(shape.groups) for shape in near)
        simple = [shape for shape in near if len(shape.groups) == fewest]
        self.best = min(simple, key=lambda shape: (complexity(self.problem, shape.draft()), self.known[shape]))
        self.rank = self.known[self.best]

    def _with_fewer_stages(self, number: int, limit: float) -> list[Shape]:
        """The best shape for each smaller number of stages, fewest first, if it may get as fast as the limit."""
        best: dict[int, Shape] = {}
        for shape, rank in sorted(self.known.items(), key=lambda entry: entry[1]):
            if len(shape.groups) < number and (0, limit) < rank <= (0, limit * NEARLY):
                best.setdefault(len(shape.groups), shape)
        return [best[stages] for stages in sorted(best)][:NUM_STARTS]

    def save(self) -> None:
        """Turn off slack that gains no time: it still costs memory."""
        if self.best is None:
            return
        for stage in range(len(self.best.groups)):
            slack = tuple(0 if index == stage else count for index, count in enumerate(self.best.slacks))
            self._take_if_as_good(replace(self.best, slack=slack))

    def _take_if_as_good(self, shape: Shape) -> None:
        rank = self.evaluate(shape.draft()).rank
        if rank <= self.rank:
            self.best, self.rank, self.known[shape] = shape, rank, rank

    def _starts(self) -> list[Shape]:
        self._take(FIRST_SHARE, self._first_shapes())
        if not self.done:
            self._take_graphpipe()
        if self.problem.idle_devices:
            self._take(FEWER_SHARE, self._cut(on_fewer_devices(self.problem, self._orders())))
        best = nsmallest(NUM_SLACKENED, self.known, key=self.known.__getitem__)
        self._take(FIRST_SHARE, with_slack(self.problem, best))
        return self.leaders()

    def _take_graphpipe(self) -> None:
        problem = self.problem
        if problem.num_units <= GRAPHPIPE_UNITS and problem.num_devices <= MAX_SLOTS:
            draft = graphpipe(problem, replace(self.control.part(GRAPHPIPE_SHARE), progress=None)).draft
            shape = None if draft is None else Shape.of(draft)
            if shape is not None:
                self.kept.append(shape)
                self._judge(shape)

    def _take(self, share: float, shapes: Iterable[Shape]) -> None:
        """Judge shapes for a share of the search; at least one, so that there is a plan however short the time is."""
        whole, self.control = self.control, self.control.part(share)
        for shape in shapes:
            if self.done and self.known:
                break
            self._judge(shape)
        self.control = whole

    def _first_shapes(self) -> Iterator[Shape]:
        problem, found = self.problem, self._orders()
        yield from self._cut(variants(problem, found))
        if self.best is None:
            yield from self._cut(replace(cuts, fitting=False) for cuts in variants(problem, found))

    def _orders(self) -> list[list[int]]:
        return orders(self.problem, self.problem.seconds(self.problem.sizes[len(self.problem.sizes) // 2]).total)

    def _cut(self, variants: Iterable[Cuts]) -> Iterator[Shape]:
        for cuts in variants:
            if self.control.expired and self.known:
                return
            number = -(-self.problem.batch_size // cuts.size)
            for shape in seeds(self.problem, cuts, partial(self._worth, number)):
                yield shape
                if len(set(shape.replicas)) == 1 and shape.replicas[0] > 1:
                    yield replace(shape, spread=True)

    def _worth(self, number: int, seconds: float) -> bool:
        """True if a plan whose slowest stage takes these seconds per micro-batch can come near the best step."""
        self.control.count()
        return self.rank[0] > 0 or number * seconds < 1.1 * self.rank[1]

    def _judge(self, shape: Shape, limit: float = inf) -> Rank:
        """The rank of a shape: memory, then seconds. Seconds of `limit` or more are only a lower bound."""
        if shape not in self.known:
            rank = self.evaluate(shape.draft(), limit).rank
            self.control.count()
            if rank[1] >= limit:
                self.refused.add(shape)
                return rank
            self.known[shape] = rank
            self.control.count(EVALUATIONS_PER_ACTION * self._num_actions(shape))
            if rank < self.rank:
                self.best, self.rank = shape, rank
                self.control.report(self.control.done, rank[1], self.bound)
        return self.known[shape]

    def _num_actions(self, shape: Shape) -> float:
        """Number of actions that the estimate of a shape simulates, each for all replicas."""
        return min(EXACT_ACTIONS, 2 * len(shape.groups) * -(-self.problem.batch_size // shape.size))

    def _improve(self, shape: Shape, enough: float = 0.0) -> None:
        """Apply changes that make the step shorter until there is none, or it is short enough."""
        rank = self._judge(shape)
        improved = True
        while improved and not self.done and rank > (0, enough):
            improved = False
            for candidate in moves(self.problem, shape, self._loads(shape)):
                if self.done:
                    return
                if candidate in self.known or candidate in self.refused:
                    continue
                found = self._judge(candidate, rank[1] if rank[0] == 0 else inf)
                if found < (rank[0], rank[1] * (1 - 1e-9)):
                    shape, rank, improved = candidate, found, True
                    break

    def _loads(self, shape: Shape) -> list[float]:
        """Seconds of every stage's own work in a step."""
        number = -(-self.problem.batch_size // shape.size)
        figures = [self.evaluate.figures(stage) for stage in self._fitted(shape).stages]
        return [number * (entry.forward + entry.again + entry.backward) + entry.all_reduce for entry in figures]

    def _disturbed(self, shape: Shape, random: Random) -> Shape:
        for _ in range(random.choice((1, 2, 3))):
            options = list(moves(self.problem, shape, [random.random() for _ in shape.groups]))
            if options:
                shape = random.choice(options)
        return shape

    def answer(self) -> Answer:
        draft = self._fitted(self.best) if self.best is not None and self.found else None
        return Answer(
            draft=draft,
            objective=self.rank[1],
            objective_name=f"seconds of a {self.problem.judged_by}",
            states=self.evaluate.evaluations,
            alternatives=tuple(sorted(self._alternatives(), key=lambda entry: entry.seconds)),
            tolerance=self.problem.simplicity,
            bound=self.bound * GOOD_ENOUGH / self.problem.num_slices,
            neighbours=self._neighbours,
        )

    def _fitted(self, shape: Shape) -> Draft:
        return self.evaluate.fitted(shape.draft())

    def _neighbours(self, draft: Draft) -> Iterator[Draft]:
        """The drafts one move away that fit the memory, the shortest estimates first."""
        shape = Shape.of(draft)
        if shape is None:
            return
        others = list(moves(self.problem, shape, self._loads(shape)))[-MAX_MOVES:]
        self.control.count(len(others))
        ranks = {other: self.evaluate(other.draft()).rank for other in others}
        yield from (self._fitted(other) for other in sorted(ranks, key=ranks.__getitem__) if ranks[other] < (0, inf))

    def _alternatives(self) -> Iterator[Alternative]:
        """Those kept, the fastest, and the best with other micro-batch sizes and numbers of stages and devices."""
        chosen, first = dict[_Kind, Shape](), [] if self.fastest is None else [self.fastest]
        for shape in [*first, *sorted(self.known, key=self.known.__getitem__)]:
            if len(chosen) < NUM_ALTERNATIVES or _kind(shape) in chosen:
                chosen.setdefault(_kind(shape), shape)
        for shape in dict.fromkeys([*self.kept, *chosen.values()]):
            if shape != self.best and self.known.get(shape, self.rank)[1] < inf:
                draft = self._fitted(shape)
                yield Alternative(draft=draft, seconds=self.evaluate(draft).seconds)


def _kind(shape: Shape) -> _Kind:
    return shape.size, len(shape.groups), shape.num_devices
