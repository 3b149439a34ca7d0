"""A device learns from answers that its sends have arrived."""

from __future__ import annotations

from hypothesis import given, settings

from lightning_gpp.plan import Plan
from lightning_gpp.runtime.receipts import receipts
from lightning_gpp.schedules import Op, compile_program
from tests.strategies import plan_of, plans


def test_gradients_prove_that_activations_arrived() -> None:
    program = compile_program(plan_of([(0, 1)], [1, 1], 2))
    sender = program.devices[1]
    (found,) = [r for device, r in enumerate(receipts(program)) if device == 1]
    answers = {}
    for position, arrived in found.items():
        message = program.messages[sender[position].message or 0]
        assert message.gradient
        answers[str(message.consumer)] = [str(program.messages[i].producer) for _, i in arrived]
    assert answers == {"0B0": ["0F0"], "0B1": ["0F1"]}


@settings(max_examples=40, deadline=None)
@given(plans())
def test_receipts_name_own_earlier_sends_once(plan: Plan) -> None:
    program = compile_program(plan)
    for device, found in enumerate(receipts(program)):
        instructions = program.devices[device]
        seen: set[int] = set()
        for position, arrived in found.items():
            assert instructions[position].op is Op.WAIT
            sent = {i.message for i in instructions[:position] if i.op is Op.SEND}
            numbers = {number for _, number in arrived}
            assert numbers <= sent - seen
            seen |= numbers
