"""A recomputed stage computes what it computes otherwise, to the last bit, and keeps nothing but its inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.errors import GPPError
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.runtime import LOSS, Executor, MicroBatch, RandomStreams
from lightning_gpp.runtime.recompute import SMALL, ModuleState
from lightning_gpp.schedules import compile_program
from lightning_gpp.stages import build
from lightning_gpp.stages.step import InContext
from tests.runtime.stages import Mixer
from tests.runtime.test_executor import Altered, NoTransport, executor_of, one_device
from tests.strategies import rerunning

SAMPLES, WIDTH = 8, 6


class Counting(nn.Module):
    """Reads and changes what it keeps: a buffer in place, one anew, a large one, a number, a tensor, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("large", torch.ones(SMALL + 1, dtype=torch.float64))
        self.number, self.state = 1, torch.ones(WIDTH, dtype=torch.float64)
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x * (1 + self.calls + self.number + self.state) * self.large[:WIDTH].clone() + self.mean
        with torch.no_grad():
            self.calls.add_(1)
            self.large.mul_(1.1)
            self.mean = 0.9 * self.mean + y.mean(0)
            self.state = y[0].detach()
            self.number += 2
            self.history.append(self.number)
        return y


class Towers(nn.Module):
    """Two towers with dropout and batch norm, one of them with a checkpoint inside, a head, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(3, WIDTH), nn.Dropout(), Checkpointed(), nn.BatchNorm1d(WIDTH))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(a), self.right(b)], dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch).square().mean()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class Chain(Towers):
    """Blocks that change their state, in front of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting(), nn.Dropout()) for _ in "ab"])
        self.head = nn.Linear(WIDTH, 1)
        del self.left, self.right

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def drafts(groups: Sequence[Sequence[str]], recompute: bool | tuple[str, ...]) -> list[Stage]:
    """All stages on one device; the last group runs the step, and is not recomputed unless blocks of it are listed."""
    return [
        Stage(
            name=f"s{number}",
            modules=tuple(group),
            devices=(0,),
            micro_batch_size=2,
            recompute=_of(recompute, group) if isinstance(recompute, tuple) else recompute and STEP not in group,
        )
        for number, group in enumerate(groups)
    ]


def _of(blocks: tuple[str, ...], group: Sequence[str]) -> tuple[str, ...]:
    return tuple(path for path in blocks if any(f"{path}.".startswith(f"{module}.") for module in group))


def train(
    module: nn.Module,
    captured: Capture,
    batch: Any,
    plan: Plan,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    num_steps: int = 2,
) -> list[float]:
    """Losses of the micro-batches; gradients and buffers are the module's."""
    pipeline = build(captured, plan, module)
    executor = Executor(
        compile_program(plan),
        0,
        stages=[InContext(stage, context) for stage in pipeline.stages],
        slots=pipeline.slots,
        transport=NoTransport(),
        source=pipeline.source,
        streams=RandomStreams(7),
    )
    losses = []
    for step in range(num_steps):
        pipeline.step.begin(batch, lambda samples: module.training_step(samples, 0), step)  # type: ignore[operator]
        executor.run(loss_weight=1 / SAMPLES, step=step)
        losses += [
            loss.item() if isinstance(loss, Tensor) else loss["loss"].item() for _, loss in pipeline.step.outputs
        ]
        pipeline.step.end()
    return losses


def state_of(module: nn.Module) -> dict[str, Any]:
    counting = [part for part in module.modules() if isinstance(part, Counting)]
    return {
        **{f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()},
        **dict(module.named_buffers()),
        **{f"state {number}": part.state for number, part in enumerate(counting)},
        **{f"number {number}": torch.tensor(part.number) for number, part in enumerate(counting)},
        **{f"history {number}": torch.tensor(part.history) for number, part in enumerate(counting)},
    }


def rows(*widths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64) for width in widths]


TOWER_STAGES = [["left"], ["right"], ["head", STEP]]
CUT_TOWER_STAGES = [["left.0", "left.1"], ["left.2", "left.3", "right"], ["head"], [STEP]]
CHAIN_STAGES = [["blocks.0"], ["blocks.1"], ["head", STEP]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    ("make", "widths", "stages", "recompute"),
    [
        (Towers, (4, 3), CUT_TOWER_STAGES, True),
        (Chain, (WIDTH,), CHAIN_STAGES, True),
        (Towers, (4, 3), TOWER_STAGES, ("left.1", "left.2", "right.0", "right.2", "right.3")),
        (Towers, (4, 3), CUT_TOWER_STAGES, ("left.0", "left.3", "right", "head")),
        (Chain, (WIDTH,), [["blocks"], ["head", STEP]], ("blocks",)),
        (Chain, (WIDTH,), [["blocks", "head", STEP]], ("blocks.1", "head")),
    ],
)
def test_nothing_but_memory_changes(
    make: Callable[[], nn.Module], widths: Sequence[int], stages: list[list[str]], recompute: Any, schedule: str
) -> None:
    """Dropout, batch norm, checkpoints inside, and modules that change their state; stages and blocks of them."""
    batch, found = rows(*widths), []
    for chosen in (False, recompute):
        module = make().double()
        captured = capture_step(module, batch)
        plan = make_plan(captured.graph, drafts(stages, chosen), batch_size=SAMPLES, schedule=schedule)
        assert any(stage.recompute for stage in plan.stages) == bool(chosen)
        found.append((train(module, captured, batch, plan), state_of(module)))
    (losses, expected), (recomputed_losses, actual) = found
    assert recomputed_losses == losses
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


class Large(nn.Module):
    """Saves much more than it receives."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(layers)]
        )
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).square().mean()


def saved_by(recompute: tuple[str, ...]) -> tuple[int, float]:
    """Bytes that autograd saves in a forward, and those that the plan says."""
    module, batch = Large(4), torch.randn(SAMPLES, 64)
    captured = capture_step(module, batch)
    plan = make_plan(captured.graph, drafts([["blocks", "head", STEP]], recompute), batch_size=SAMPLES)
    (stage,) = build(captured, plan, module).stages
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = stage.code({"input0": batch}, SAMPLES)  # type: ignore[attr-defined]
    assert results
    return sum(sizes.values()), plan.stages[0].figures.activation_bytes.at(SAMPLES)


def test_what_is_kept_is_what_the_plan_says() -> None:
    for recompute in ((), ("blocks.0",), ("blocks.1", "blocks.2"), ("blocks",)):
        actual, planned = saved_by(recompute)
        assert actual == pytest.approx(planned, rel=0.02), recompute
    assert saved_by(("blocks",))[0] < 0.3 * saved_by(())[0]


def test_the_second_run_is_under_the_same_autocast() -> None:
    def context() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    batch, gradients = [tensor.float() for tensor in rows(4, 3)], []
    for recompute in (False, True):
        module = Towers()
        captured = capture_step(module, batch, context=context)
        plan = make_plan(captured.graph, drafts(TOWER_STAGES, recompute), batch_size=SAMPLES)
        assert any(spec.dtype == "bfloat16" for operator in captured.graph for spec in operator.outputs)
        train(module, captured, batch, plan, context)
        gradients.append([parameter.grad for parameter in module.parameters()])
    for once, again in zip(*gradients, strict=True):
        assert torch.equal(once, again)


class Held:
    """A tensor that autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Observing(Mixer):
    """Notes at every forward how much autograd holds."""

    held: weakref.WeakSet[Held]

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        self.seen = [*getattr(self, "seen", []), len(self.held)]
        return super().forward(values, micro_batch)


@pytest.mark.parametrize("recompute", [False, True])
def test_between_forward_and_backward_only_the_inputs_are_held(recompute: bool) -> None:
    plan = rerunning(replace(one_device(), schedule="gpipe"), recompute)
    first, sink = Mixer(plan, 0), Observing(plan, 1)
    sink.held = held = weakref.WeakSet()

    def pack(tensor: Tensor) -> Held:
        held.add(one := Held(tensor.detach()))
        return one

    executor = executor_of(plan, [first, sink])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        executor.run()
    assert first.peak_alive == (1 if recompute else 4)
    assert (sink.seen[0] == 0) == recompute
    assert not held
    assert not first.tokens


def test_after_a_failure_nothing_is_held_and_it_runs_again() -> None:
    plan = rerunning(one_device(), True)
    first, sink = Mixer(plan, 0), Altered(plan, 1, LOSS, lambda loss: None)
    executor = executor_of(plan, [first, sink])
    with pytest.raises(GPPError, match="no loss"):
        executor.run()
    assert not first.tokens
    kept = [forward.inputs for lane in executor._lanes for forward in lane.recomputed.values()]
    assert kept == [{}] * 4
    sink.change = lambda loss: loss
    executor.run()
    assert first.weight.grad is not None


class InPlace(Mixer):
    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        outputs = super().forward(values, micro_batch)
        values["x"].mul_(2)
        return outputs


def test_an_input_that_was_changed_in_place_is_noticed() -> None:
    plan = rerunning(one_device(), True)
    stages = [InPlace(plan, 0), Mixer(plan, 1)]
    executor = executor_of(plan, stages)
    with pytest.raises(GPPError, match=r"'stage0' \(micro-batch 0\) cannot be recomputed: its inputs \['x'\].*clone"):
        executor.run()


class TestModuleState:
    def test_large_tensors_are_copied_only_after_a_change(self) -> None:
        module = nn.Module()
        module.register_buffer("table", torch.zeros(SMALL + 1))
        state = ModuleState([module])
        first, second = state.snapshot(), state.snapshot()
        module.table.add_(1)
        third = state.snapshot()
        copies = [found.tensors[0][2].copy for found in (first, second, third)]
        assert copies[0] is copies[1]
        assert (copies[1][0], copies[2][0]) == (0, 1)

    def test_the_second_run_cannot_spoil_a_shared_copy(self) -> None:
        module = nn.Module()
        module.register_buffer("table", torch.zeros(SMALL + 1))
        state = ModuleState([module])
        found, other = state.snapshot(), state.snapshot()
        module.table.add_(1)
        for one in (found, other):
            with state.restored(one):
                assert module.table[0] == 0
                module.table.add_(5)
            assert module.table[0] == 1

    def test_tied_buffers_stay_tied_and_new_attributes_go(self) -> None:
        first, second = nn.Module(), nn.Module()
        first.register_buffer("table", torch.zeros(3))
        second.register_buffer("table", first.table)
        state = ModuleState([first, second])
        found, kept = state.snapshot(), first.table
        first.table.add_(1)
        with state.restored(found):
            assert first.table is second.table
            assert not first.table.any()
            first.extra = 1
            first.register_buffer("late", torch.ones(1))
        assert first.table is second.table is kept
        assert not hasattr(first, "extra")
        assert not hasattr(first, "late")

    def test_what_was_made_in_inference_mode_has_no_version(self) -> None:
        module = nn.Module()
        with torch.inference_mode():
            module.last = torch.ones(2)
        state = ModuleState([module])
        found = state.snapshot()
        module.last = torch.zeros(2)
        with state.restored(found):
            assert torch.equal(module.last, torch.ones(2))
