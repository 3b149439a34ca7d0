"""The examples with blocks that are recomputed, and with slack, on two processes: steps against the simulated ones.

    python benchmarks/kept_or_repeated_examples.py [--rounds 40] [--small]

A step is all forwards and backwards of a mini-batch, as in `benchmarks/estimate.py`, whose plans these are. Costs are
measured. The table compares how much longer each variant takes than the plan that keeps everything, because errors of
the costs are in both. All variants run in turn, so that other work on the machine affects them equally; they must give
the gradients of the first one bit for bit.

Mini-batches are larger than the examples' own, and feature_towers is wider, so that an action takes milliseconds, and
the executor's own work, which no cost model has, is a small part of it. `--small` takes the examples as they are.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from estimate import STEPS_PER_ROUND, Runner, ms, plan_of, predicted, print_table
from examples_by_name import EXAMPLES, model_and_batch
from processes import load, run
from torch import Tensor

from lightning_gpp.capture import capture_step
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.measure.costs import measure_costs

BLOCKS: Final = {"two_tower": "text_tower.blocks.0", "feature_towers": "mean_tower", "gpt_text": "blocks.0"}
"""A block of each example's first stage."""

LARGER: Final[Mapping[str, Mapping[str, int]]] = {
    "two_tower": {"batch_size": 512},
    "feature_towers": {"batch_size": 320, "width": 512},
    "gpt_text": {"batch_size": 64},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a plan has in its first stage, and its simulated step in seconds."""

    example: str
    label: str
    first: Mapping[str, Any]
    seconds: float
    settings: Mapping[str, Any]


def variants_of(example: str, settings: Mapping[str, Any]) -> list[Variant]:
    """The plan that keeps everything comes first."""
    model, batch = model_and_batch(example, **settings)
    captured, cluster = capture_step(model, batch), preset_cluster("cpu_host", num_devices=2)
    size = plan_of(example, captured).stages[0].micro_batch_size
    with tempfile.TemporaryDirectory() as cache:
        sizes = (size, captured.batch_size)
        costs = measure_costs(captured, model, batch, device=cluster.devices[0], sizes=sizes, cache=cache)
    changes: dict[str, dict[str, Any]] = {
        "everything is kept": {},
        f"{BLOCKS[example]} recomputed": {"recompute": [BLOCKS[example]]},
        "the first stage recomputed": {"recompute": True},
        "slack 1": {"slack": 1},
    }
    plans = ((label, first, plan_of(example, captured, first)) for label, first in changes.items())
    return [
        Variant(
            example=example,
            label=label,
            first=first,
            seconds=predicted(label, captured, plan, cluster, costs).seconds,
            settings=settings,
        )
        for label, first, plan in plans
    ]


def measure(rank: int, variants: Sequence[Variant], rounds: int) -> None:
    """Run all variants of an example in turn."""
    runners = [Runner(rank, variant.example, variant.first, **variant.settings) for variant in variants]
    executors = [runner.executor() for runner in runners]
    best = [float("inf")] * len(variants)
    expected: list[Tensor] = []
    for number in range(1 + rounds):
        for index, (runner, executor) in enumerate(zip(runners, executors, strict=True)):
            seconds = min(runner.step(executor) for _ in range(STEPS_PER_ROUND))
            best[index] = min(best[index], seconds) if number else best[index]  # the first round warms up
            gradients = [each.grad.clone() for each in runner.model.parameters() if each.grad is not None]
            expected = expected or gradients
            if not all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True)):
                raise RuntimeError(f"{variants[index].label}: the gradients differ from those of the first variant")
    if rank == 0:
        report(variants, best)


def report(variants: Sequence[Variant], best: Sequence[float]) -> None:
    rows = []
    for variant, seconds in zip(variants, best, strict=True):
        simulated, executed = variant.seconds / variants[0].seconds, seconds / best[0]
        cells = [variant.example, variant.label, ms(variant.seconds), ms(seconds)]
        rows.append([*cells, f"{simulated:.3f}", f"{executed:.3f}", f"{executed / simulated - 1:+.1%}"])
    print_table("model | first stage | simulated, ms | best, ms | simulated ratio | executed ratio | difference", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help=f"of {STEPS_PER_ROUND} steps of every variant")
    parser.add_argument("--small", action="store_true", help="the examples with their own sizes")
    given = parser.parse_args()
    print(f"{load()}; 2 processes with one thread each; {given.rounds * STEPS_PER_ROUND} steps\n")
    for example in EXAMPLES:
        run(2, measure, variants_of(example, {} if given.small else LARGER[example]), given.rounds)


if __name__ == "__main__":
    main()
