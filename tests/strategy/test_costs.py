"""Costs that rank 0 measures, and the plan that it finds with them, are those of all ranks."""

from __future__ import annotations

from typing import Any

from lightning_gpp import GPPStrategy
from tests.strategy import harness
from tests.strategy.harness import loader, make_module


def fitted(rank: int, **given: Any) -> list[Any]:
    """Trained with measured costs for a named cluster: the plan on every rank, and where its costs come from."""
    settings: dict[str, Any] = {"costs": "measured", "cluster": "cpu_host", "search_seconds": 0.5, "max_replicas": 1}
    strategy = GPPStrategy(num_micro_batches=4, **settings, **given)
    trainer = harness.trainer(strategy, 2, max_epochs=1)
    module = make_module()
    trainer.fit(module, loader(8))
    assert strategy.plan is not None
    machine = strategy._training.machine()
    costs = "" if machine.costs is None else machine.costs.name
    return [str(strategy.plan), strategy.plan.notes, costs, machine.footprint.optimizer, strategy.timeline().makespan]


def test_rank_0_measures_and_searches_for_all() -> None:
    (plan, notes, costs, optimizer, seconds), other = harness.run(2, fitted)
    assert other[:2] == [plan, notes]
    assert notes["cluster"] == "cpu_host"
    assert "measured on" in costs
    assert optimizer == "adamw"
    assert seconds > 0
