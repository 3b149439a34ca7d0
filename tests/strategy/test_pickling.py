"""A trainer and its strategy can be pickled before and after a run."""

from __future__ import annotations

import pickle
from typing import Any

from tests.strategy.harness import TwoTowers, loader, run, strategy, trainer


def pickled(rank: int) -> bool:
    machine: Any = trainer(strategy(stages=None), 1)
    again = pickle.loads(pickle.dumps(machine))
    again.validate(TwoTowers().double(), loader(10), verbose=False)
    return bool(again.strategy.options == machine.strategy.options)


def pickled_after_a_run(rank: int) -> bool:
    machine: Any = trainer(strategy(), 2)
    machine.fit(TwoTowers().double(), loader())
    machine.validate(machine.lightning_module, loader(10), verbose=False)
    again = pickle.loads(pickle.dumps(machine)) if rank == 0 else machine  # others have parts of the module
    return bool(again.strategy.options == machine.strategy.options)


def test_trainer_and_strategy() -> None:
    assert run(1, pickled) == [True]


def test_after_a_run() -> None:
    assert run(2, pickled_after_a_run) == [True, True]
