"""A sample of random plans, executed by real processes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from lightning_gpp.plan import Plan
from lightning_gpp.schedules import in_flight
from tests.runtime.cases import Case, run_cases
from tests.runtime.stages import make_data, reference
from tests.strategies import offloading, plans, rerunning

PER_WORLD_SIZE = 4


def sample() -> dict[int, list[Plan]]:
    """The same plans every time, by number of devices; plans of one stage are left out."""
    found: dict[int, list[Plan]] = {2: [], 3: [], 4: []}

    @settings(
        max_examples=120,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(plans(max_devices=4))
    def collect(plan: Plan) -> None:
        group = found.get(plan.num_devices, [])
        if len(plan.stages) > 2 and len(group) < PER_WORLD_SIZE:
            group.append(plan)

    collect()
    return found


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_random_plans_equal_one_process(num_devices: int) -> None:
    """With activations kept, recomputed and offloaded."""
    kept = sample()[num_devices]
    assert len(kept) == PER_WORLD_SIZE
    chosen = [*kept, *map(rerunning, kept), *map(offloading, kept)]
    run_cases([Case(plan, plan.batch_size) for plan in chosen])


def test_the_reference_itself_has_gradients() -> None:
    """Otherwise the comparison would be empty."""
    for group in sample().values():
        for plan in group:
            assert in_flight(plan, plan.batch_size)
            _, gradients = reference(plan, make_data(plan.batch_size))
            assert any(gradient is not None and gradient.any() for gradient in gradients.values())
