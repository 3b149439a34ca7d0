"""Recorded stages compute what stages compute otherwise, to the last bit, and say why they are not recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpp.capture import capture_step
from lightning_gpp.plan import STEP, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.runtime import Executor, RandomStreams
from lightning_gpp.runtime import recorded as module_under_test
from lightning_gpp.runtime.cuda import recorder_of
from lightning_gpp.runtime.recorded import MOST, WARM, Recording
from lightning_gpp.runtime.recorded_stage import Recorder
from lightning_gpp.schedules import compile_program
from lightning_gpp.stages import build
from lightning_gpp.stages.step import in_context
from tests.runtime.tape import Tape
from tests.runtime.test_executor import NoTransport

SAMPLES, WIDTH, STEPS = 8, 6, 10
CPU = torch.device("cpu")
Context = Callable[[], AbstractContextManager[Any]]


class Towers(nn.Module):
    """Two towers with dropout and batch norm, an embedding, a frozen layer, a head, and a step that keeps results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Embedding(5, WIDTH), nn.Dropout(), nn.ReLU(inplace=True))
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(2 * WIDTH, 1)
        self.kept: list[Tensor] = []

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(a), self.fixed(self.right(b))], dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        result = self(*batch)
        self.kept.append(result.detach())
        return result.mul_(2).square().mean()


class Blocks(nn.Module):
    """Blocks without buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh()) for _ in "abc"])
        self.rate = nn.Dropout(0.5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        for block in self.blocks:
            a = block(a) + a
        return self.rate(a)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch).square().mean()


class Contrasted(nn.Module):
    """Two towers that meet in a product of the step, whose gradients of the second tower could wait."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(4, WIDTH), nn.Embedding(5, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.image(batch[0]) @ self.text(batch[1]).t()).square().mean()


TOWERS = [["left"], ["right", "fixed"], ["head", STEP]]
CONTRASTED = [["image"], ["text", STEP]]
BLOCKS = [["blocks.0"], ["blocks.1"], ["blocks.2", "rate", STEP]]


def data(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    a, b = torch.randn(SAMPLES, 4, generator=generator), torch.randint(0, 5, (SAMPLES,), generator=generator)
    return a.to(device), b.to(device)


class Run:
    """A module in training, in stages on one device."""

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Sequence[str]],
        schedule: str = "1f1b",
        *,
        recompute: bool = False,
        recording: Recording | None = None,
        context: Context = nullcontext,
        device: torch.device = CPU,
        **options: Any,
    ) -> None:
        self.module, self.device = module.to(device), device
        captured = capture_step(module, data(0, device), context=context)
        drafts = [
            Stage(
                name=group[0],
                modules=tuple(group),
                devices=(0,),
                micro_batch_size=2,
                recompute=recompute and STEP not in group,
            )
            for group in stages
        ]
        plan = make_plan(captured.graph, drafts, batch_size=SAMPLES, schedule=schedule)
        self.pipeline = build(captured, plan, module)
        self.executor = Executor(
            compile_program(plan),
            0,
            stages=[in_context(stage, context) for stage in self.pipeline.stages],
            slots=self.pipeline.slots,
            transport=NoTransport(),
            source=self.pipeline.source,
            torch_device=device,
            streams=RandomStreams(7, device),
            recording=recording,
            **options,
        )
        self.optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.02, momentum=0.9)
        self.seen: list[Any] = []

    def step(self, number: int, accumulated: bool = False) -> None:
        if not accumulated:
            self.optimizer.zero_grad()
        self.pipeline.step.begin(
            data(number, self.device), lambda samples: self.module.training_step(samples, 0), number
        )
        self.executor.run(loss_weight=1 / SAMPLES, step=number)
        self.seen += [loss.clone() for _, loss in self.pipeline.step.outputs]
        self.seen += [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]
        self.pipeline.step.end()
        self.optimizer.step()

    def results(self) -> list[Any]:
        kept = getattr(self.module, "kept", [])
        return [*self.seen, *(buffer.clone() for buffer in self.module.buffers()), *kept]


def in_order(tape: Tape) -> bool:
    """True if the records of a mini-batch were repeated in the order in which they were made, but for the first one,
    which zeros gradients.
    """
    turns, tape.turns = tape.turns[1:], []
    return turns == sorted(set(turns))


def assert_same(
    make: Callable[[Recording | None], Run],
    during: Callable[[Run, int], None] | None = None,
    recorder: Recorder | None = None,
) -> Tape:
    """Train twice, the second time with records."""
    results, tape = [], Tape()
    for recording in (None, Recording(recorder=recorder or tape)):
        run = make(recording)
        for number in range(STEPS):
            if during is not None:
                during(run, number)
            run.step(number, accumulated=number in (4, 6))
            assert in_order(tape)
        results.append(run.results())
        assert recording is None or run.executor.recorded
    for plain, recorded in zip(*results, strict=True):
        assert (plain is None and recorded is None) or torch.equal(plain, recorded)
    return tape


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(("make", "stages"), [(Towers, TOWERS), (Blocks, BLOCKS), (Blocks, [["blocks", "rate", STEP]])])
def test_nothing_but_launches_changes(make: Callable[[], nn.Module], stages: Any, schedule: str) -> None:
    tape = assert_same(lambda recording: Run(make(), stages, schedule, recording=recording))
    micro_batches = SAMPLES // 2
    assert tape.count == 1 + micro_batches * len(stages) * (3 if schedule == "zb_h1" else 2)


def test_split_backwards_wait_for_no_record() -> None:
    assert_same(lambda recording: Run(Contrasted(), CONTRASTED, "zb_h1", recording=recording))


def test_recomputed_stages() -> None:
    tape = assert_same(lambda recording: Run(Blocks(), BLOCKS, recompute=True, recording=recording))
    assert tape.count == 1 + SAMPLES // 2 * (3 + 3 + 2)


def test_autocast() -> None:
    def context() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    assert assert_same(lambda recording: Run(Towers(), TOWERS, recording=recording, context=context)).count


def test_changes_of_attributes_and_frozen_parameters_are_recorded_anew() -> None:
    def during(run: Run, number: int) -> None:
        if number == 3:
            run.module.rate.p = 0.1
        if number == 5:
            run.module.blocks[1].requires_grad_(False)
        if number == 7:
            run.module.blocks[1].requires_grad_(True)

    tape = assert_same(lambda recording: Run(Blocks(), BLOCKS, recording=recording), during)
    assert tape.count == 4 * (1 + SAMPLES // 2 * 3 * 2)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.detach().abs().max().item()


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x * 2


class Checkpointed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(torch.tanh, x, use_reentrant=False)
        return result


def _with_hook(module: Blocks) -> None:
    module.blocks[1].register_forward_hook(lambda module, args, output: output * 2)


def _with_gradient_hook(module: Blocks) -> None:
    module.blocks[1][0].weight.register_hook(lambda gradient: gradient * 2)


def _with_backward_hook(module: Blocks) -> None:
    module.blocks[1][0].register_full_backward_hook(lambda module, before, after: (before[0] * 2,))


def _counting(module: Blocks) -> None:
    module.blocks[1].append(Counting())


def _listing(module: Blocks) -> None:
    module.blocks[1].append(Listing())


def _checkpointed(module: Blocks) -> None:
    module.blocks[1].append(Checkpointed())


def _reading(module: Blocks) -> None:
    module.blocks[1].append(Reading())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with_hook, "modules have hooks"),
        (_with_gradient_hook, "parameters have hooks"),
        (_with_backward_hook, "hooks around their backward"),
        (_counting, "Counting sets attributes"),
        (_listing, "Listing sets attributes"),
        (_checkpointed, "activation checkpoints"),
        (_reading, "a record may not read values"),
    ],
)
def test_what_cannot_be_recorded_runs_as_before(
    change: Callable[[Blocks], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make(recording: Recording | None) -> Run:
        module = Blocks()
        change(module)
        return Run(module, BLOCKS, recording=recording)

    runs: list[Run] = []
    with caplog.at_level(logging.INFO, logger="lightning_gpp.runtime.recorded"):
        tape = assert_same(lambda recording: runs.append(make(recording)) or runs[-1])
    plain, recorded = (run.module.blocks[1][-1] for run in runs)
    assert getattr(plain, "calls", 0) == getattr(recorded, "calls", 0)
    assert getattr(plain, "seen", []) == getattr(recorded, "seen", [])
    assert tape.count
    assert "recorded stages: blocks.0, blocks.2" in caplog.text
    assert "stage 'blocks.1' is not recorded" in caplog.text
    assert reason in caplog.text


def test_attributes_that_always_change_are_given_up_on(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Blocks(), BLOCKS, recording=Recording(recorder=Tape(), demanded=True))
    for number in range(WARM + 2 * MOST + 2):
        run.module.rate.p = 0.9 / (1 + number)
        run.step(number)
    assert "change from step to step" in caplog.text
    assert not run.executor.recorded


def test_changes_once_in_an_epoch_are_never_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "WORTH", 3)
    run = Run(Blocks(), BLOCKS, recording=Recording(recorder=Tape(), demanded=True))
    for number in range(6 * (MOST + 2)):
        run.module.rate.p = 0.9 / (1 + number // 6)
        run.step(number)
    assert run.executor.recorded == {0, 1, 2}


def test_gradients_of_stages_that_are_not_recorded_stay_as_they_are() -> None:
    module = Blocks()
    _reading(module)
    run = Run(module, BLOCKS, recording=Recording(recorder=Tape()))
    tied = module.blocks[1][0].bias
    for number in range(WARM):
        run.step(number)
    run.optimizer.zero_grad()
    kept = tied.grad = torch.ones_like(tied)
    tied.requires_grad_(False)
    run.step(WARM, accumulated=True)
    assert run.executor.recorded == {0, 2}
    assert tied.grad is kept


def test_a_frozen_parameter_keeps_its_gradient() -> None:
    run = Run(module := Blocks(), BLOCKS, recording=Recording(recorder=Tape()))
    frozen = module.blocks[1][0].bias
    for number in range(WARM + 1):
        if number == WARM - 1:
            frozen.requires_grad_(False)
        run.step(number, accumulated=number >= WARM - 1)
    assert run.executor.recorded == {0, 1, 2}
    assert frozen.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(("make", "stages"), [(Towers, TOWERS), (Blocks, BLOCKS), (Blocks, [["blocks", "rate", STEP]])])
@pytest.mark.parametrize("recompute", [False, True])
def test_on_a_gpu(make: Callable[[], nn.Module], stages: Any, schedule: str, recompute: bool) -> None:
    device = torch.device("cuda", 0)

    def run(recording: Recording | None) -> Run:
        return Run(make(), stages, schedule, recompute=recompute, recording=recording, device=device)

    assert_same(run, recorder=recorder_of(device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
def test_on_a_gpu_stages_that_cannot_be_recorded_disturb_no_others() -> None:
    device = torch.device("cuda", 0)

    def make(recording: Recording | None) -> Run:
        module = Blocks()
        _reading(module)
        return Run(module, BLOCKS, recording=recording, device=device)

    def during(run: Run, number: int) -> None:
        if number == WARM + 2:
            run.module.rate.p = 0.1

    assert_same(make, during, recorder_of(device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
def test_on_a_gpu_losses_may_be_kept_with_their_graphs() -> None:
    device = torch.device("cuda", 0)

    def during(run: Run, number: int) -> None:
        run.module.losses.append(next(run.module.parameters()).sum())  # keeps the node that adds to the gradient

    def make(recording: Recording | None) -> Run:
        module = Blocks()
        module.losses = []
        return Run(module, BLOCKS, recording=recording, device=device)

    assert_same(make, during, recorder_of(device))
