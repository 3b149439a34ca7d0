"""The default partitioner: any DAG, any stages, replicas, micro-batch size and schedule, jointly.

First drafts are contiguous cuts of two orders of the units (`seeds`), and the draft of GraphPipe's dynamic program.
The best ones are improved by single changes (`moves`) as long as the step gets shorter. Then the best
of all is perturbed and improved again, until the search is over, there was no improvement for long, or the step is as
short as the lower bound (`bound`) allows. Every draft is judged by the simulated seconds of its whole step and by the
memory of every device, with the cheapest measures that make it fit (`Evaluator.fitted`).

Of those that are nearly as fast as the best, one with the fewest stages is the answer (`Problem.simplicity`).

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
from lightning_gpp.planning.partitioners.auto.moves import arranged, moves, spread, with_slack
from lightning_gpp.planning.partitioners.auto.seeds import Cuts, orders, seed, variants
from lightning_gpp.planning.partitioners.auto.unequal import unequal
from lightning_gpp.planning.partitioners.graphpipe import graphpipe
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Problem, busy_bound

MIN_PIECES, PIECES_PER_SLOT, COARSE_SHARE = 192, 3, 0.7
"""Number of larger units for a first search, in total and per device, and its share of the time."""

PATIENCE = 150
"""The search ends after this many perturbations in a row without improvement."""

FIRST_SHARE = 0.15
"""Share of the time for finding first drafts; as much again for slack in the best ones."""

GRAPHPIPE_SHARE, GRAPHPIPE_UNITS, MAX_SLOTS = 0.15, 300, 64
"""Share of the search for GraphPipe's dynamic program, and the most units and devices for which it is quick."""

NUM_STARTS = 6
"""Number of drafts that are improved."""

GOOD_ENOUGH = 1.002
"""Multiple of the lower bound at which the search ends, because little is left to be gained."""

MAX_MOVES = 500
"""Most moves that are rated to improve a draft by its program: the last ones, which change no stage's units."""

NUM_SLACKENED = 100
"""Number of first drafts that are judged with slack, too."""

NUM_ALTERNATIVES = 6
"""Number of kinds of drafts, the best one's included, of which the best is an alternative."""

Rank = tuple[float, float]

_Kind = tuple[int, int, int]
"""Micro-batch size, number of stages and number of devices."""


@register_partitioner("auto")
def auto(problem: Problem, control: SearchControl) -> Answer:
    """Find the shortest step in `control.seconds`; a good plan takes a fraction of that."""
    search = Search(problem, control, busy_bound(problem))
    search.run(_first_results(search))
    search.simplify()
    search.save()
    if not search.found and not (problem.idle_devices or problem.every_device):
        return auto(replace(problem, idle_devices=True), control)
    return search.answer()


def _first_results(search: Search) -> list[Draft]:
    """The results of a search on larger units, if there are many units."""
    problem, control = search.problem, search.control
    num_pieces = max(MIN_PIECES, PIECES_PER_SLOT * min(problem.num_devices, MAX_SLOTS))
    if problem.num_units < 1.5 * num_pieces:
        return []
    coarser = coarse(problem, num_pieces)
    first = Search(coarser.problem, control.part(COARSE_SHARE), search.bound)
    first.run()
    search.kept = [coarser.refined(draft) for draft in first.kept]
    search.take([*search.kept, *map(coarser.refined, first.leaders())])
    return search.leaders()


@dataclass(slots=True)
class Search:
    """The state of one search: the ranks of drafts, and the best draft.

    `kept` are drafts that are alternatives in any case; `fastest` is the best draft before simpler ones were preferred.
    """

    problem: Problem
    control: SearchControl
    bound: float
    evaluate: Evaluator = field(init=False)
    known: dict[Draft, Rank] = field(default_factory=dict)
    kept: list[Draft] = field(default_factory=list)
    best: Draft | None = None
    rank: Rank = (inf, inf)
    fastest: Draft | None = None

    def __post_init__(self) -> None:
        self.evaluate = Evaluator(self.problem)

    def take(self, drafts: Iterable[Draft]) -> None:
        """Judge drafts that were found elsewhere."""
        for draft in drafts:
            self._judge(draft)

    def leaders(self) -> list[Draft]:
        """The best drafts of different sizes and numbers of stages and devices, best first."""
        chosen: dict[_Kind, Draft] = {}
        for draft in nsmallest(200, self.known, key=self.known.__getitem__):
            chosen.setdefault(_kind(draft), draft)
        return list(chosen.values())[:NUM_STARTS]

    @property
    def done(self) -> bool:
        good = self.rank[0] == 0 and self.rank[1] <= self.bound * GOOD_ENOUGH
        return good or self.control.expired

    @property
    def found(self) -> bool:
        """True if there is a draft, even if it does not fit the memory."""
        return self.best is not None and self.rank[1] < inf

    def run(self, starts: Sequence[Draft] = ()) -> None:
        """Improve the given drafts, or the best first ones; then perturb the best one and improve again."""
        for draft in starts or self._starts():
            if self.done:
                return
            self._improve(draft)
        random, failures = Random(0), 0
        while not self.done and self.best is not None and failures < PATIENCE:
            before = self.rank
            self._improve(self._disturbed(self.best, random))
            failures = 0 if self.rank < before else failures + 1

    def simplify(self) -> None:
        """Answer with a draft of the fewest stages that is nearly as fast as the fastest."""
        if self.best is None or self.rank[0] > 0 or not self.problem.simplicity:
            return
        self.fastest, limit = self.best, self.rank[1] * (1 + self.problem.simplicity)
        near = [draft for draft, rank in self.known.items() if rank <= (0, limit)]
        self.best = min(near, key=lambda draft: (len(draft.groups), self.known[draft]))
        self.rank = self.known[self.best]

    def save(self) -> None:
        """Turn off slack that gains no time: it still costs memory."""
        if self.best is None:
            return
        for stage in range(len(self.best.groups)):
            slack = (0 if index == stage else count for index, count in enumerate(self.best.slack))
            self._take_if_as_good(self.best.with_stages(slack=slack))

    def _take_if_as_good(self, draft: Draft) -> None:
        rank = self.evaluate(draft).rank
        if rank <= self.rank:
            self.best, self.rank, self.known[draft] = draft, rank, rank

    def _starts(self) -> list[Draft]:
        self._take(FIRST_SHARE, self._first_drafts())
        self._take(FIRST_SHARE, self._unequal_drafts())
        if not self.done:
            self._take_graphpipe()
        best = nsmallest(NUM_SLACKENED, self.known, key=self.known.__getitem__)
        self._take(FIRST_SHARE, with_slack(self.problem, best))
        return self.leaders()

    def _take_graphpipe(self) -> None:
        problem = self.problem
        if problem.num_units <= GRAPHPIPE_UNITS and problem.num_devices <= MAX_SLOTS:
            found = graphpipe(problem, self.control.part(GRAPHPIPE_SHARE)).draft
            if found is not None:
                draft = arranged(found)
                self.kept.append(draft)
                self._judge(draft)

    def _take(self, share: float, drafts: Iterable[Draft]) -> None:
        """Judge drafts for a share of the search; at least one, so that there is a plan however short the time is."""
        whole, self.control = self.control, self.control.part(share)
        for draft in drafts:
            if self.done and self.known:
                break
            self._judge(draft)
        self.control = whole

    def _variants(self) -> list[Cuts]:
        weights = self.problem.seconds(self.problem.sizes[len(self.problem.sizes) // 2]).total
        return variants(self.problem, orders(self.problem, weights))

    def _first_drafts(self) -> Iterator[Draft]:
        for cuts in self._variants():
            draft = seed(self.problem, cuts)
            yield draft
            if cuts.width > 1:
                yield spread(draft)

    def _unequal_drafts(self) -> Iterator[Draft]:
        problem = self.problem
        if problem.max_replicas == 1 or problem.num_devices > MAX_SLOTS:
            return
        for cuts in self._variants():
            if cuts.width == 1 and cuts.stages == min(problem.num_devices, problem.num_units):
                number = -(-problem.batch_size // cuts.size)
                yield from unequal(problem, cuts, partial(self._worth, number))

    def _worth(self, number: int, seconds: float) -> bool:
        """True if a plan whose slowest stage takes these seconds per micro-batch can come near the best step."""
        self.control.count()
        return self.rank[0] > 0 or number * seconds < 1.1 * self.rank[1]

    def _judge(self, draft: Draft) -> Rank:
        """The rank of a draft: memory, then seconds."""
        if draft not in self.known:
            rank = self.known[draft] = self.evaluate(draft).rank
            self.control.count()
            if rank < self.rank:
                self.best, self.rank = draft, rank
        return self.known[draft]

    def _improve(self, draft: Draft) -> None:
        """Apply changes that make the step shorter until there is none."""
        rank = self._judge(draft)
        improved = True
        while improved and not self.done:
            improved = False
            for candidate in moves(self.problem, draft, self._loads(draft)):
                if self.done:
                    return
                if candidate in self.known:
                    continue
                found = self._judge(candidate)
                if found < (rank[0], rank[1] * (1 - 1e-9)):
                    draft, rank, improved = candidate, found, True
                    break

    def _loads(self, draft: Draft) -> list[float]:
        """Seconds of every stage's own work in a step."""
        number = -(-self.problem.batch_size // draft.size)
        figures = [self.evaluate.figures(stage) for stage in self.evaluate.fitted(draft).stages]
        return [number * (entry.forward + entry.again + entry.backward) + entry.all_reduce for entry in figures]

    def _disturbed(self, draft: Draft, random: Random) -> Draft:
        for _ in range(random.choice((1, 2, 3))):
            options = list(moves(self.problem, draft, [random.random() for _ in draft.groups]))
            if options:
                draft = random.choice(options)
        return draft

    def answer(self) -> Answer:
        draft = self.evaluate.fitted(self.best) if self.best is not None and self.found else None
        return Answer(
            draft=draft,
            objective=self.rank[1],
            states=self.evaluate.evaluations,
            alternatives=tuple(sorted(self._alternatives(), key=lambda draft: self.evaluate(draft).seconds)),
            tolerance=self.problem.simplicity,
            bound=self.bound * GOOD_ENOUGH / self.problem.num_slices,
            neighbours=self._neighbours,
        )

    def _neighbours(self, draft: Draft) -> Iterator[Draft]:
        """The drafts one move away that fit the memory, the shortest estimates first."""
        draft = arranged(draft)
        others = list(moves(self.problem, draft, self._loads(draft)))[-MAX_MOVES:]
        self.control.count(len(others))
        ranks = {other: self.evaluate(other).rank for other in others}
        best = (other for other in sorted(ranks, key=ranks.__getitem__) if ranks[other] < (0, inf))
        yield from map(self.evaluate.fitted, best)

    def _alternatives(self) -> Iterator[Draft]:
        """Those kept, the fastest, and the best with other micro-batch sizes and numbers of stages and devices."""
        chosen, first = dict[_Kind, Draft](), [] if self.fastest is None else [self.fastest]
        for draft in [*first, *sorted(self.known, key=self.known.__getitem__)]:
            if len(chosen) < NUM_ALTERNATIVES or _kind(draft) in chosen:
                chosen.setdefault(_kind(draft), draft)
        for draft in dict.fromkeys([*self.kept, *chosen.values()]):
            if draft != self.best and self.known.get(draft, self.rank)[1] < inf:
                yield self.evaluate.fitted(draft)


def _kind(draft: Draft) -> _Kind:
    return draft.size, len(draft.groups), draft.num_devices
