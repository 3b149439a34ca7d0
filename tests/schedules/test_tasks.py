"""Tasks by number say the same as by name."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.list_scheduling import Clock
from lightning_gpp.schedules.work import work_of
from lightning_gpp.schedules.zero_bubble import LEADS, _leads
from tests.strategies import chain, plans


@settings(max_examples=30, deadline=None)
@given(plan=plans(), split=st.booleans())
def test_numbers_stand_for_tasks(plan: Plan, split: bool) -> None:
    work = work_of(plan, plan.batch_size, split=split)
    tasks = list(work.tasks.numbers)
    assert list(zip(work.tasks.devices, work.tasks.actions, strict=True)) == tasks == list(work.seconds)
    for number, task in enumerate(tasks):
        assert work.tasks.numbers[task] == number
        assert work.tasks.seconds[number] == work.seconds[task]
        assert work.tasks.missing[number] == work.missing[task]
        assert [(tasks[reader], travel) for reader, travel in work.tasks.readers[number]] == work.readers[task]


@settings(max_examples=30, deadline=None)
@given(plan=plans(detached=False))
def test_the_clock_starts_what_is_ready(plan: Plan) -> None:
    """Whatever is taken, as long as all that it waits for is there: everything gets done, once, in a sound order."""
    work = work_of(plan, plan.batch_size)
    clock, rest = Clock(plan.num_devices, work.tasks), set(range(len(work.tasks.seconds)))
    stops: dict[int, float] = {}
    for device in clock.turns():
        ready = [task for task in sorted(rest) if work.tasks.devices[task] == device and clock.is_ready(task)]
        if ready:
            rest.remove(ready[0])
            clock.start(ready[0])
            stops[ready[0]] = clock.free[device]
    assert not rest
    assert sorted(map(len, clock.rows)) == sorted(work.tasks.devices.count(i) for i in range(plan.num_devices))
    for task, stop in stops.items():
        for reader, travel in work.tasks.readers[task]:
            assert stop + travel + work.tasks.seconds[reader] <= stops[reader]


def test_leads_beyond_all_micro_batches_are_tried_once() -> None:
    plan = chain((1,) * 6, 2, "zero_bubble")
    found = list(_leads(plan, work_of(plan, 2)))
    assert len(found) == len(set(found)) < len(LEADS)
    assert max(max(lead) for lead in found) == 2
