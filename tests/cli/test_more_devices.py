"""The shipped examples on more and more devices of one machine."""

from __future__ import annotations

import pytest

from benchmarks.examples_by_name import EXAMPLES
from lightning_gpp.cli.task import predict, task_of
from tests.cli.commands import composed


@pytest.mark.acceptance
@pytest.mark.parametrize("strategy", ["gpp", "pipeline"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_never_slower_on_more_devices(example: str, strategy: str) -> None:
    """By the programs, with the default settings; simplicity may cost 2 %."""
    rates = []
    for number in (1, 2, 4, 8):
        machine = ["cluster=dgx_a100", f"cluster.num_devices={number}"]
        quick = ["strategy.search_seconds=2"]
        config = composed(f"experiment={example}", f"strategy={strategy}", *machine, *quick, name="plan")
        rates.append(predict(task_of(config)).samples_per_second)
    assert all(after >= 0.98 * before for before, after in zip(rates, rates[1:], strict=False)), rates
