"""Programs that never flush: what a period is, how far ahead stages are, and that any number of them is safe."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from benchmarks.quality.one_device import on_one_device
from lightning_gpp.cluster import Link
from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import compile_program, verify
from lightning_gpp.schedules.actions import Kind
from lightning_gpp.schedules.continuous import continuous_program, delays_of, unrolled
from lightning_gpp.schedules.program import Program
from lightning_gpp.simulation import StageCosts, simulate_period
from tests.strategies import chain, plan_of, plans, towers

SKIP = plan_of([(0, 1), (1, 2), (0, 2)], [1, 1, 1], 4, data=True)
REPLICATED = plan_of([(0, 1), (1, 2)], [2, 2, 2], 8, devices=[(2, 3), (1,), (0,)], data=True)
SHARED_DEVICES = plan_of([(0, 1), (1, 2), (2, 3)], [1] * 4, 4, devices=[(1,), (0,), (1,), (0,)], data=True)
SIZES = plan_of([(0, 1), (1, 2)], [1, 2, 4], 8, data=True)

FROZEN = plan_of([(0, 1)], [4, 4], 16, devices=[(1, 2), (0,)], data=True)
FROZEN = replace(FROZEN, edges=tuple(replace(edge, differentiable=False) for edge in FROZEN.edges))
"""Its two replicas take half as long as the other stage, and wait for no gradients."""

PLANS = {
    "chain": chain([1] * 4, 4),
    "one micro-batch": chain([1] * 4, 1),
    "towers": towers(2, 2, 4),
    "skip": SKIP,
    "replicas": REPLICATED,
    "several stages per device": SHARED_DEVICES,
    "micro-batches of other sizes": SIZES,
    "a stage that is not trained": FROZEN,
    "a last micro-batch that is smaller": plan_of([(0, 1), (1, 2), (0, 2)], [3, 3, 3], 8, data=True),
}


def text_of(program: Program, device: int) -> str:
    """The actions of a device's period; one ' for every mini-batch that an action is ahead."""
    row = zip(program.devices[device], program.ahead[device], strict=True)
    return " ".join(f"{instruction.action}{chr(39) * ahead}" for instruction, ahead in row if instruction.action)


def test_the_period_of_1f1b() -> None:
    program = continuous_program(chain([1] * 3, 2))
    assert text_of(program, 2) == "0F0' 0B0 0F1' 0B1"
    assert text_of(program, 1) == "1F1 1B0 1F0' 1B1"
    assert text_of(program, 0) == "2F0 2B0 2F1 2B1"


@pytest.mark.parametrize("depth", [2, 3, 5, 8])
def test_delays_on_a_chain_are_the_published_staircase(depth: int) -> None:
    program = continuous_program(chain([1] * depth, 1))
    assert list(delays_of(program).values()) == [depth - 1 - stage for stage in range(depth)]


def test_delays_on_a_graph_follow_its_depth() -> None:
    graph = towers(2, 2, 1)
    assert delays_of(continuous_program(graph)) == {0: 2, 1: 1, 2: 2, 3: 1, 4: 0}
    assert delays_of(continuous_program(graph.chained())) == {0: 4, 1: 3, 2: 2, 3: 1, 4: 0}


def test_weight_gradients_do_not_hold_back_the_optimizer_step() -> None:
    """With a flush, ZB-H1 leaves them for the bubble at the end; here that would make the sink's weights late."""
    program = continuous_program(chain([1] * 3, 2, schedule="zb_h1"))
    assert text_of(program, 2) == "0F0' 0I0 0W0 0F1' 0I1 0W1"
    assert text_of(program, 0) == "2F0 2I0 2F1 2I1 2W0 2W1"
    assert delays_of(program) == delays_of(continuous_program(chain([1] * 3, 2)))


@pytest.mark.parametrize("plan", [chain([1] * 4, 1), towers(2, 2, 1)], ids=["chain", "towers"])
def test_layerpipe_doubles_delays_and_hides_links(plan: Plan) -> None:
    """LayerPipe2's delays; a link that takes half of a micro-batch's work does not lengthen the period."""
    late = replace(plan, schedule="layerpipe")
    assert list(delays_of(continuous_program(late)).values()) == [
        2 * delay for delay in delays_of(continuous_program(plan)).values()
    ]
    costs = replace(StageCosts.uniform(plan, 1, 2, weight=0.5), default_link=Link(latency=1.5))
    assert simulate_period(late, costs).seconds == pytest.approx(3)
    assert simulate_period(plan, costs).seconds >= 4.5


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2", "layerpipe", "interleaved", "adaptive", "zero_bubble"])
@pytest.mark.parametrize("name", PLANS)
def test_every_schedule_with_a_steady_state(name: str, schedule: str) -> None:
    program = continuous_program(replace(PLANS[name], schedule=schedule))
    for device, row in enumerate(program.devices):
        for instruction, ahead in zip(row, program.ahead[device], strict=True):
            if instruction.action is not None and instruction.action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                assert ahead == 0, "a gradient before the optimizer step that it does not belong to"


def test_a_schedule_without_one_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"strategy.schedule=gpipe does not settle.*strategy.schedule=1f1b"):
        continuous_program(chain([1] * 4, 4, schedule="gpipe"))


def test_replicas_in_turn_must_take_equally_many_micro_batches() -> None:
    stages = tuple(replace(stage, round_robin=index == 0) for index, stage in enumerate(REPLICATED.stages))
    continuous_program(replace(REPLICATED, stages=stages))
    with pytest.raises(
        ScheduleError, match=r"2 replicas that take micro-batches of 2 samples in turn.*mini-batch of 6"
    ):
        continuous_program(replace(REPLICATED, stages=stages), 6)


def test_fsdp_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"strategy.sharding=fsdp .* strategy.sharding=zero1 or none"):
        continuous_program(replace(REPLICATED, sharding="fsdp"))


@settings(max_examples=25, deadline=None)
@given(plans(max_stages=5))
def test_random_graphs(plan: Plan) -> None:
    """With a last micro-batch that may be smaller."""
    assume(len(plan.stages[plan.step_stage].devices) == 1)  # as in training: one device runs the user's step
    size = max(stage.micro_batch_size for stage in plan.stages)
    stages = tuple(replace(stage, micro_batch_size=size, round_robin=False) for stage in plan.stages)
    plan = replace(plan, stages=stages, batch_size=2 * size + (size > 1), schedule="1f1b")
    program = None
    with suppress(ScheduleError):  # without gradients nothing holds a stage back, and there is no steady state
        program = continuous_program(plan)
    assume(program is not None)
    for number in (program.lead + 4, program.lead + 7):
        verify(unrolled(program, number))


def test_what_is_written_out_computes_what_single_programs_compute() -> None:
    flushed, program = compile_program(SKIP), unrolled(continuous_program(SKIP), 3)
    for device in range(3):
        single = [i.action for i in flushed.devices[device] if i.action is not None]
        many = [i.action for i in program.devices[device] if i.action is not None]
        count = len(SKIP.intervals(0))
        again = [a._replace(micro_batch=a.micro_batch + b * count) for b in range(3) for a in single]
        assert sorted(map(str, many)) == sorted(map(str, again))


@pytest.mark.parametrize(("name", "depth"), [("chain", 4), ("towers", 3), ("one micro-batch", 4)])
def test_a_period_has_no_bubble(name: str, depth: int) -> None:
    """Flushed 1F1B takes M + D - 1 slots for M micro-batches, a period takes M."""
    plan = PLANS[name]
    count = len(plan.intervals(0))
    period = simulate_period(plan, StageCosts.uniform(plan, 1, 1))
    assert period.seconds == pytest.approx(2 * count)
    assert period.flushed == pytest.approx(2 * (count + depth - 1))
    assert period.fill_and_drain == pytest.approx(2 * (depth - 1))


def test_on_one_device_every_action_has_the_same_lead() -> None:
    program = continuous_program(towers(2, 1, 4))
    merged = on_one_device(program)
    wanted = {
        instruction.action: ahead
        for device, row in enumerate(program.devices)
        for instruction, ahead in zip(row, program.ahead[device], strict=True)
        if instruction.action is not None and instruction.action.kind is not Kind.DATA
    }
    found = dict(zip((i.action for i in merged.devices[0]), merged.ahead[0], strict=True))
    assert {action: found[action] for action in wanted} == wanted
