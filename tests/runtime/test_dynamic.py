"""Dynamic edges: tensors of any shape, dtype and number, in order with the messages of known shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.errors import ShapeError
from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.runtime import LOSS, DistributedTransport, Executor, Mesh, MicroBatch, Slot, pairs_of
from lightning_gpp.runtime.boundary import header_length, header_of, read_header
from lightning_gpp.schedules import compile_program
from tests.distributed import run_distributed
from tests.runtime.stages import SAMPLES, WIDTH, Data, make_data, spec
from tests.strategies import plan_of

UNKNOWN = spec(0)
SLOTS = {
    (SOURCE, 0): (Slot("x", spec(SAMPLES, WIDTH)), Slot("index", spec(SAMPLES, dtype="int64"))),
    (SOURCE, 1): (Slot("x", spec(SAMPLES, WIDTH)), Slot("index", spec(SAMPLES, dtype="int64"))),
    (0, 1): (Slot("kept", UNKNOWN), Slot("where", UNKNOWN), Slot("maybe", UNKNOWN)),
    (0, 2): (Slot("sum", spec(SAMPLES, requires_grad=True)),),
    (1, 2): (Slot("tower", spec(SAMPLES, requires_grad=True)),),
}


class Selecting(nn.Module):
    """Keeps the rows whose index is even: their number is known only when they are there."""

    uses_random = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH))

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor | None]:
        hidden = values["x"] @ self.weight
        where = (values["index"] % 2 == 0).nonzero().flatten()
        maybe = hidden.mean() if micro_batch.index % 2 else None
        return {"kept": hidden[where], "where": where, "maybe": maybe, "sum": hidden.sum(1)}


class Scattering(nn.Module):
    """Puts the rows back into their places."""

    uses_random = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        kept = values["kept"].sin() * self.scale
        rows = torch.zeros(micro_batch.num_samples, WIDTH, dtype=torch.float64)
        result = rows.index_add(0, values["where"], kept).sum(1)
        return {"tower": result + values["maybe"] if "maybe" in values else result}


class Joining(nn.Module):
    uses_random = False

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        return {LOSS: (values["sum"] * values["tower"]).mean()}


def _plan(devices: list[list[int]]) -> Plan:
    plan = plan_of([(0, 1), (0, 2), (1, 2)], [2, 2, 2], 8, devices=devices, data=True)
    edges = [replace(edge, dynamic=(edge.src, edge.dst) == (0, 1)) for edge in plan.edges]
    return replace(plan, edges=(*edges, Edge(src=SOURCE, dst=1, differentiable=False)))


def _run(rank: int, plan: Plan) -> dict[str, Tensor | None]:
    mesh = Mesh(plan.num_devices, 1, rank)
    stages = [Selecting(), Scattering(), Joining()]
    executor = Executor(
        compile_program(plan),
        rank,
        stages=stages,
        slots=[SLOTS[edge.src, edge.dst] for edge in plan.edges],
        transport=DistributedTransport(mesh, pairs_of(plan)),
        source=make_data(8),
    )
    executor.run(loss_weight=1 / 8)
    executor.run(loss_weight=1 / 8)
    return {name: p.grad for stage in stages for name, p in stage.named_parameters()}


def _expected() -> dict[str, Tensor]:
    stages = [Selecting(), Scattering(), Joining()]
    data: Data = make_data(8)
    for _ in range(2):
        for index in range(4):
            micro_batch = MicroBatch(index, 2 * index, 2 * index + 2, 8)
            values: dict[str, Tensor] = dict(data.inputs(micro_batch))
            for stage in stages:
                outputs = stage(values, micro_batch)
                values |= {name: value for name, value in outputs.items() if value is not None}
            (values[LOSS] * 2 / 8).backward()
    return {name: p.grad for stage in stages for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("devices", [[[1], [0], [0]], [[0], [1], [0]], [[0], [0], [0]], [[2], [1], [0]]])
def test_gradients_cross_dynamic_edges(devices: list[list[int]]) -> None:
    plan = _plan(devices)
    results = run_distributed(plan.num_devices, _run, plan)
    for name, expected in _expected().items():
        (actual,) = [result[name] for result in results if result[name] is not None]
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_headers_round_trip() -> None:
    tensors = [torch.zeros(2, 0, 3), None, torch.tensor(True), torch.ones(4, dtype=torch.bfloat16, requires_grad=True)]
    header = header_of(tensors)
    assert len(header) == header_length(4)
    forms, flags = read_header(header)
    assert flags == [False, False, False, True]
    assert forms == [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]


def test_what_a_header_cannot_say_is_refused() -> None:
    with pytest.raises(ShapeError, match="at most 8 dimensions"):
        header_of([torch.zeros([1] * 9)])
    with pytest.raises(ShapeError, match="announces 3 tensors, expected 1"):
        read_header(torch.tensor([3] + [0] * (header_length(1) - 1)))
