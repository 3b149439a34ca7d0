"""Messages and instructions, literally."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.errors import PlanError
from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.schedules import Op, Program, compile_program, lower
from tests.strategies import chain, plan_of, schedule_of


def forward_messages(program: Program) -> list[str]:
    """`producer@device>consumer@device start-stop` of all forward messages."""
    return [f"{m.producer}@{m.src}>{m.consumer}@{m.dst} {m.start}-{m.stop}" for m in program.messages if not m.gradient]


def test_unequal_micro_batches_share_their_intersections() -> None:
    program = compile_program(chain((2, 3), 5))
    assert forward_messages(program) == ["0F0@1>1F0@0 0-2", "0F1@1>1F0@0 2-3", "0F1@1>1F1@0 3-4", "0F2@1>1F1@0 4-5"]


def test_replicas_share_micro_batches() -> None:
    plan = plan_of([(0, 1)], (4, 6), 12, devices=[(0,), (1, 2)])
    assert forward_messages(compile_program(plan)) == [
        "0F0@0>1F0@1 0-3",
        "0F0@0>1F0@2 3-4",
        "0F1@0>1F0@2 4-6",
        "0F1@0>1F1@1 6-8",
        "0F2@0>1F1@1 8-9",
        "0F2@0>1F1@2 9-12",
    ]


def test_a_replica_without_samples_still_acts() -> None:
    program = compile_program(plan_of([(0, 1)], (1, 1), 1, devices=[(1,), (0, 2)]))
    assert [str(i.action) for i in program.devices[0] if i.op is Op.COMPUTE] == ["1F0", "1B0", "1G0"]
    assert not any(program.inputs[0, action] for device, action in program.inputs if device == 0)


def test_data_go_from_the_devices_of_the_step() -> None:
    program = compile_program(plan_of([(0, 1)], (1, 2), 4, data=True), training=False)
    data = [m for m in program.messages if program.plan.edges[m.edge].src == SOURCE]
    assert [(str(m.producer), m.src, str(m.consumer), m.dst) for m in data] == [
        ("1D0", 0, "0F0", 1),
        ("1D0", 0, "0F1", 1),
        ("1D1", 0, "0F2", 1),
        ("1D1", 0, "0F3", 1),
    ]


def test_no_gradients_through_detached_edges_and_in_inference() -> None:
    plan = chain((1, 1), 2)
    detached = replace(plan, edges=(replace(plan.edges[0], differentiable=False),))
    assert not any(message.gradient for message in compile_program(detached).messages)
    assert not any(message.gradient for message in compile_program(plan, training=False).messages)


def test_a_buffer_is_posted_earlier_where_a_later_message_needs_it() -> None:
    """Device 1 makes the inputs of stages 1 and 2 of device 0 in the order 0F0, 0F1; device 0 reads them otherwise."""
    plan = plan_of([(0, 1)], (1, 1), 3, devices=[(1,), (0,)])
    schedule = schedule_of("0: 1F2 1F1 1F0 1B0 1B1 1B2\n1: 0F0 0F1 0F2 0B0 0B1 0B2")
    program = lower(plan, schedule)
    posts = [i.message for i in program.devices[0] if i.op is Op.POST]
    sends = [i.message for i in program.devices[1] if i.op is Op.SEND]
    assert posts == sends
    assert [i.op for i in program.devices[0][:4]] == [Op.POST, Op.POST, Op.POST, Op.WAIT]


def _plan_with(edge: Edge, sizes: tuple[int, int], devices: list[tuple[int, ...]]) -> Plan:
    return replace(plan_of([(0, 1)], sizes, 8, devices=devices), edges=(edge,))


def test_tensors_that_cannot_be_cut() -> None:
    edge = Edge(src=0, dst=1, sliceable=False)
    compile_program(_plan_with(edge, (2, 2), [(1,), (0,)]))
    compile_program(_plan_with(edge, (4, 4), [(2, 3), (0, 1)]))
    message = (
        r"Stage 'stage0' \(micro_batch_size 2, 1 replicas\) sends tensors to "
        r"Stage 'stage1' \(micro_batch_size 4, 1 replicas\).*the same micro_batch_size and number"
    )
    with pytest.raises(PlanError, match=message):
        compile_program(_plan_with(edge, (2, 4), [(1,), (0,)]))
    with pytest.raises(PlanError, match="1 replicas.*2 replicas"):
        compile_program(_plan_with(edge, (2, 2), [(2,), (0, 1)]))
