"""What the executor refuses, frees, draws and measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpp.errors import GPPError, ShapeError
from lightning_gpp.plan import Plan
from lightning_gpp.runtime import LOSS, DistributedTransport, Executor, Mesh, MicroBatch, RandomStreams, pairs_of
from lightning_gpp.schedules import compile_program
from tests.distributed import run_distributed
from tests.runtime.stages import Mixer, all_slots, make_data, make_stages
from tests.strategies import action_of, plan_of


class NoTransport:
    """For programs that stay on one device."""

    def send(self, tensor: Tensor, device: int) -> Any:
        raise AssertionError("nothing to send")

    receive = send


def one_device(num_stages: int = 2, sizes: int = 2, batch_size: int = 8) -> Plan:
    pairs = [(i, i + 1) for i in range(num_stages - 1)]
    return plan_of(pairs, [sizes] * num_stages, batch_size, devices=[(0,)] * num_stages, data=True)


def executor_of(plan: Plan, stages: list[Any], training: bool = True, **options: Any) -> Executor:
    return Executor(
        compile_program(plan, training=training),
        0,
        stages=stages,
        slots=all_slots(plan),
        transport=NoTransport(),
        source=make_data(plan.batch_size),
        **options,
    )


class Altered(Mixer):
    """Changes one output of one micro-batch."""

    def __init__(self, plan: Plan, index: int, name: str, change: Any) -> None:
        super().__init__(plan, index)
        self.name, self.change = name, change

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        outputs = super().forward(values, micro_batch)
        if micro_batch.index == 1:
            outputs[self.name] = self.change(outputs[self.name])
        return {name: value for name, value in outputs.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: rows[:1],
            r"'stage0' \(micro-batch 1\) returned 'stage0.rows' with shape \(1, 3\).*expected.*\(2, 3\)",
        ),
        (lambda rows: rows.float(), r"torch.float32; expected are \(2, 3\) and torch.float64"),
        (lambda rows: None, r"did not return 'stage0.rows'; it returned \['stage0.columns'"),
    ],
)
def test_an_unexpected_tensor_is_refused(change: Any, message: str) -> None:
    plan = one_device()
    stages = [Altered(plan, 0, "stage0.rows", change), Mixer(plan, 1)]
    with pytest.raises(ShapeError, match=message) as caught:
        executor_of(plan, stages).run()
    assert any("rank 0, stage 'stage0', action 0F1 (compute)" in note for note in caught.value.__notes__)


def _refuse(rank: int, plan: Plan) -> None:
    mesh = Mesh(plan.num_devices, 1, rank)
    stages = [Altered(plan, 0, "stage0.rows", lambda rows: rows[:1]), Mixer(plan, 1)]
    executor = Executor(
        compile_program(plan),
        rank,
        stages=stages,
        slots=all_slots(plan),
        transport=DistributedTransport(mesh, pairs_of(plan)),
        source=make_data(plan.batch_size),
    )
    executor.run()


def test_the_sender_refuses_before_it_sends() -> None:
    """gloo would cut the message off, or kill the process. The receiver sees that the peer is gone, and where."""
    plan = plan_of([(0, 1)], [2, 2], 8, data=True)
    with pytest.raises(AssertionError) as caught:
        run_distributed(2, _refuse, plan)
    assert "ShapeError: Stage 'stage0' (micro-batch 1) returned 'stage0.rows'" in str(caught.value)
    assert "rank 1, stage 'stage0', action 0F1 (compute)" in str(caught.value)
    assert "rank 0, stage 'stage1', action 1F1 (wait)" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss: None, r"'stage1' \(micro-batch 1\) returned no loss"),
        (lambda loss: loss.detach(), "requires_grad=False"),
        (lambda loss: loss.expand(2), r"loss of shape \(2,\)"),
    ],
)
def test_every_micro_batch_needs_a_loss(change: Any, message: str) -> None:
    plan = one_device()
    with pytest.raises(GPPError, match=message):
        executor_of(plan, [Mixer(plan, 0), Altered(plan, 1, LOSS, change)]).run()


def test_after_a_failure_the_executor_holds_no_tensor_and_runs_again() -> None:
    plan = one_device()
    stage = Altered(plan, 1, LOSS, lambda loss: None)
    stages = [Mixer(plan, 0), stage]
    executor = executor_of(plan, stages)
    with pytest.raises(GPPError, match="no loss"):
        executor.run()
    assert not stages[0].tokens
    stage.change = lambda loss: loss
    executor.run()
    assert executor.current_action == action_of("0B3")


def test_inference_runs_without_autograd_and_keeps_nothing() -> None:
    plan = one_device(3)
    stages = make_stages(plan)
    executor = executor_of(plan, stages, training=False)
    executor.run()
    assert all(parameter.grad is None for stage in stages for parameter in stage.parameters())
    assert all(stage.peak_alive == 1 for stage in stages)


def test_loss_weight_and_scale_multiply_every_gradient() -> None:
    plan = one_device()
    gradients = []
    for weight, scale in ((1.0, 1.0), (0.5, 8.0)):
        stages = make_stages(plan)
        executor_of(plan, stages).run(loss_weight=weight, grad_scale=scale)
        gradients.append([p.grad for stage in stages for p in stage.parameters() if p.grad is not None])
    for once, four_times in zip(*gradients, strict=True):
        torch.testing.assert_close(once * 4, four_times, rtol=1e-12, atol=0)


def test_trace_names_every_action_in_order() -> None:
    plan = one_device()
    executor = executor_of(plan, make_stages(plan), trace=True)
    with torch.profiler.profile() as profile:
        executor.run()
    expected = [i.action for i in executor.program.devices[0] if i.action is not None]
    assert [action for action, _, _ in executor.timings] == expected
    assert all(start <= stop for _, start, stop in executor.timings)
    assert {str(action) for action in expected} <= {event.name for event in profile.events()}


class Dropping(Mixer):
    """Draws random numbers, and draws the same ones again when its activations are recomputed."""

    uses_random = True

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        outputs = super().forward(values, micro_batch)
        rows = outputs[f"stage{self.index}.rows"]
        outputs[f"stage{self.index}.rows"] = checkpoint(self._drop, rows, use_reentrant=False)
        return outputs

    def _drop(self, rows: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(rows))
        self.masks = [*getattr(self, "masks", []), mask.detach()]
        return (rows * mask).sin()


def test_a_stage_draws_from_its_own_stream() -> None:
    """Masks differ between micro-batches and steps, repeat for the same step, and the caller's stream goes on."""
    plan = one_device()
    stage = Dropping(plan, 0)
    executor = executor_of(plan, [stage, Mixer(plan, 1)], streams=RandomStreams(seed=7))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    drawn = []
    for step in (0, 1, 0):
        stage.masks = []
        executor.run(step=step)
        drawn.append(stage.masks)
    assert torch.equal(torch.rand(3), expected)
    first, second, again = drawn
    assert len(first) == 8, "a forward and a recomputation for each of four micro-batches"
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in first}) == 4, "recomputed with the numbers of the forward"
