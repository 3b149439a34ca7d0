"""Where copies to and from the host stand, and what the verifier refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from lightning_gpp.errors import VerificationError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Action, Instruction, Op, compile_program, make_schedule, verify
from lightning_gpp.schedules.actions import COMPUTING, COPIES, Kind
from lightning_gpp.schedules.work import MOST_COPIED, Leaving
from tests.schedules.test_verifier import edited
from tests.strategies import action_of, chain, offloading, plans

LITERAL = {
    "gpipe": "0F0 0O0 0F1 0O1 0F2 0O2 0L0 0F3 0O3 0L1 0B0 0L2 0B1 0L3 0B2 0B3",
    "1f1b": "0F0 0O0 0F1 0O1 0L0 0F2 0O2 0B0 0L1 0F3 0O3 0B1 0L2 0F4 0O4 0B2 0L3 0F5 0O5 0L4 0B3 0L5 0B4 0B5",
    "zb_h1": "0F0 0O0 0F1 0O1 0L0 0F2 0O2 0I0 0W0 0L1 0F3 0O3 0I1 0L2 0W1 0I2 0L3 0W2 0I3 0W3",
}


def row(schedule: str) -> str:
    """The first stage of a chain of three, or a single stage."""
    shapes = {"gpipe": ((1,), 4), "1f1b": ((1, 1, 1), 6), "zb_h1": ((1, 1, 1), 4)}
    sizes, batch_size = shapes[schedule]
    plan = offloading(chain(sizes, batch_size, schedule))
    return " ".join(map(str, make_schedule(plan).devices[len(sizes) - 1]))


@pytest.mark.parametrize("schedule", LITERAL)
def test_literal(schedule: str) -> None:
    assert row(schedule) == LITERAL[schedule]


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_copies_have_one_computing_action(plan: Plan) -> None:
    """An OFFLOAD follows its forward; a LOAD is one computing action before its backward, but after its OFFLOAD."""
    program = compile_program(offloading(plan))
    for device in range(plan.num_devices):
        row = [
            i.action for i in program.devices[device] if i.action is not None and i.action.kind in (*COMPUTING, *COPIES)
        ]
        place = {action: number for number, action in enumerate(row)}
        for action in place:
            if action.kind is Kind.OFFLOAD:
                assert row[place[action] - 1] == action._replace(kind=Kind.FORWARD)
            if action.kind is Kind.LOAD:
                between = row[place[action] + 1 : place[action._replace(kind=Kind.BACKWARD)]]
                computing = [entry for entry in between if entry.kind in COMPUTING]
                assert len(computing) == 1 or row[place[action] - 1] == action._replace(kind=Kind.OFFLOAD)
        assert most_on_device(row) <= MOST_COPIED


def most_on_device(row: list[Action]) -> int:
    """The most micro-batches whose tensors are on a device with these actions."""
    leaving: Leaving[Action, Action] = Leaving()
    there: set[tuple[int, int]] = set()
    most = 0
    for action in row:
        if action.kind is Kind.OFFLOAD:
            leaving.add(action, action)
        elif action.kind is Kind.LOAD and not leaving.keep(action._replace(kind=Kind.OFFLOAD)):
            there -= {entry[::2] for entry in leaving.release()}
            there.add(action[::2])
        elif action.kind in COMPUTING:
            there -= {entry[::2] for entry in leaving.compute()}
            there.add(action[::2])
        most = max(most, len(there))
        if action.kind is Kind.BACKWARD:
            there.discard(action[::2])
    return most


PLAN = offloading(chain((1,), 3, "gpipe"))
PROGRAM = compile_program(PLAN)


def moved(action: str, before: str) -> Callable[[list[Instruction]], None]:
    def edit(rows: list[Instruction]) -> None:
        entry = Instruction(Op.COMPUTE, action=action_of(action))
        rows.remove(entry)
        rows.insert(rows.index(Instruction(Op.COMPUTE, action=action_of(before))), entry)

    return edit


@pytest.mark.parametrize(
    ("action", "before", "message"),
    [
        ("0L0", "0O0", "Device 0 runs 0L0 before the offload of the same micro-batch"),
        ("0B0", "0L0", "Device 0 runs 0B0 before the load of the same micro-batch"),
        ("0O0", "0F0", "Device 0 runs 0O0 before the forward of the same micro-batch"),
    ],
)
def test_misordered(action: str, before: str, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify(edited(PROGRAM, 0, moved(action, before)))
