"""Outcomes of random cases, and their table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one case: `refusal` by an error for users, or `failure`; both are empty if it passed."""

    number: int
    schedule: str
    seconds: float
    refusal: str = ""
    failure: str = ""


def report(outcomes: Iterable[Outcome], what: str) -> bool:
    """Print a row for each schedule, the reasons of refusals, and every failure. Returns True if there was none."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.schedule].append(outcome)
    print(f"| schedule | {what} | refused | failed | seconds, mean | slowest |\n|---|---|---|---|---|---|")
    everything = [outcome for group in groups.values() for outcome in group]
    for name, group in [*sorted(groups.items()), *([("all", everything)] if everything else [])]:
        seconds = [outcome.seconds for outcome in group]
        refused, failed = (sum(bool(text) for text in texts) for texts in zip(*map(_texts, group), strict=True))
        mean = sum(seconds) / len(seconds)
        print(f"| {name} | {len(group)} | {refused} | {failed} | {mean:.3f} | {max(seconds):.2f} |")
    reasons = Counter(_reason(outcome.refusal) for outcome in everything if outcome.refusal)
    for reason, count in reasons.most_common():
        print(f"\nrefused {count} times: {reason}")
    failures = [outcome for outcome in everything if outcome.failure]
    for outcome in sorted(failures, key=lambda outcome: outcome.number):
        print(f"\nFAILED: case {outcome.number}, {outcome.schedule}\n{outcome.failure}")
    return not failures


def _texts(outcome: Outcome) -> tuple[str, str]:
    return outcome.refusal, outcome.failure


def _reason(refusal: str) -> str:
    """The refusal without names and numbers, so that equal reasons count together."""
    words = (word for word in refusal.split() if not any(c.isdigit() for c in word))
    return " ".join(words)
