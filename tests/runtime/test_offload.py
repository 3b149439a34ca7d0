"""A stage that offloads computes the same, to the last bit; activations are on the device only around their use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_gpp.capture import capture_step
from lightning_gpp.errors import GPPError
from lightning_gpp.plan import STEP
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.runtime import LOSS, Executor
from lightning_gpp.runtime import offload as offload_module
from lightning_gpp.runtime.offload import HostLink, Offloaded, SavedBlock
from lightning_gpp.schedules import compile_program
from lightning_gpp.stages import build
from tests.runtime.stages import Mixer
from tests.runtime.test_executor import Altered, NoTransport, executor_of, one_device
from tests.runtime.test_recompute import (
    CHAIN_STAGES,
    CUT_TOWER_STAGES,
    SAMPLES,
    WIDTH,
    Chain,
    Towers,
    drafts,
    rows,
    state_of,
    train,
)
from tests.strategies import offloading

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    ("make", "widths", "stages", "recompute"),
    [
        (Towers, (4, 3), CUT_TOWER_STAGES, False),
        (Chain, (WIDTH,), CHAIN_STAGES, False),
        (Chain, (WIDTH,), CHAIN_STAGES, ("blocks.0", "head")),
    ],
)
def test_nothing_but_memory_changes(
    make: Any, widths: Sequence[int], stages: list[list[str]], recompute: Any, schedule: str
) -> None:
    """Dropout, batch norm, checkpoints and recomputed blocks inside, modules that change their state; all stages."""
    batch, found = rows(*widths), []
    for offload in (False, True):
        module = make().double()
        captured = capture_step(module, batch)
        plan = make_plan(captured.graph, drafts(stages, recompute), batch_size=SAMPLES, schedule=schedule)
        found.append((train(module, captured, batch, offloading(plan, offload)), state_of(module)))
    (losses, expected), (offloaded_losses, actual) = found
    assert offloaded_losses == losses
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


class Notes:
    """What exists at each forward of `Body`: its hidden storages, and the copies of blocks on the host."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []
        self.blocks: weakref.WeakSet[SavedBlock] = weakref.WeakSet()
        self.alive: list[int] = []
        self.on_host: list[int] = []
        self.made = 0

    def note(self) -> None:
        self.alive.append(self.num_alive)
        self.on_host.append(sum(block.on_host is not None for block in self.blocks))

    @property
    def num_alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


class Body(nn.Module):
    """Saves one storage three times, once as a view."""

    notes: Notes | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        notes = Body.notes
        if notes is not None:
            notes.note()
        hidden = torch.relu(self.first(x))
        if notes is not None:
            notes.storages.append(StorageWeakRef(hidden.untyped_storage()))
        return self.second(hidden) * hidden[:, 4:8]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.body(batch)).square().mean()


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    found = Notes()

    class Watched(SavedBlock):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            found.blocks.add(self)
            found.made += 1

    monkeypatch.setattr(offload_module, "SavedBlock", Watched)
    return found


def step_of(
    device: str, offload: bool, notes: Notes, monkeypatch: pytest.MonkeyPatch, schedule: str = "gpipe"
) -> Model:
    """A step of six micro-batches; the body is one stage, the head another."""
    module = Model().double().to(device)
    batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    captured = capture_step(module, batch)
    plan = make_plan(captured.graph, drafts([["body"], ["head", STEP]], False), batch_size=12, schedule=schedule)
    plan = offloading(plan, offload)
    pipeline = build(captured, plan, module)
    executor = Executor(
        compile_program(plan),
        0,
        stages=pipeline.stages,
        slots=pipeline.slots,
        transport=NoTransport(),
        source=pipeline.source,
        torch_device=torch.device(device),
    )
    monkeypatch.setattr(Body, "notes", notes)
    pipeline.step.begin(batch, lambda samples: module.training_step(samples, 0), 0)
    executor.run(loss_weight=1 / 12)
    pipeline.step.end()
    return module


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_are_on_the_device_only_around_their_use(
    device: str, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All forwards first, those of body and head in turn: of F0 O0 G0 O0 F1, F1 is the second action after O0."""
    step_of(device, True, notes, monkeypatch)
    assert notes.alive == [0, 0, 0, 0, 0, 0]
    assert notes.on_host == [4 * number for number in range(6)]
    assert notes.num_alive == 0
    assert not notes.blocks


def test_without_it_they_stay(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    step_of("cpu", False, notes, monkeypatch)
    assert notes.alive == [0, 1, 2, 3, 4, 5]
    assert notes.num_alive == notes.made == 0


class Recorded:
    """A graph whose saved tensors are noted, outside of any program."""

    def __init__(self) -> None:
        self.link = HostLink(torch.device("cpu"))
        self.offloaded = Offloaded(self.link)
        self.weight = torch.randn(4, 4, requires_grad=True)

    def copy(self) -> None:
        """Copy to the host, leave the device, and come back."""
        self.offloaded.start()
        self.link.settle()
        self.offloaded.load()
        self.offloaded.wait()


def blocks_of(offloaded: Offloaded) -> list[SavedBlock]:
    return offloaded._blocks()


def test_a_storage_is_copied_once_and_parameters_never() -> None:
    one = Recorded()
    x = torch.randn(3, 4)
    with one.offloaded.recording([one.weight]):
        y = x @ one.weight
        z = (y[:, :2] * y[:, 2:]).sum() + (y.t() * y.t()).sum() + (one.weight[1:] * one.weight[1:]).sum()
    blocks = blocks_of(one.offloaded)
    assert [len(block.on_device) for block in blocks if block.on_device is not None] == [x.nbytes, y.nbytes]
    one.copy()
    z.backward()
    expected = one.weight.grad
    one.weight.grad = None
    y = x @ one.weight
    ((y[:, :2] * y[:, 2:]).sum() + (y.t() * y.t()).sum() + (one.weight[1:] * one.weight[1:]).sum()).backward()
    assert expected is not None
    assert one.weight.grad is not None
    assert torch.equal(one.weight.grad, expected)


@pytest.mark.parametrize("when", ["before its copy", "during its copy", "on the device"])
def test_a_change_in_place_is_noticed(when: str) -> None:
    one = Recorded()
    with one.offloaded.recording([one.weight]):
        y = (torch.randn(3, 4) @ one.weight).exp()
        z = y.sum()
        if when == "before its copy":
            y.detach().mul_(2)
    one.offloaded.start()
    if when != "before its copy":
        y.detach().mul_(2)
    if when == "on the device":
        one.offloaded.load()
    else:
        one.link.settle()
        one.offloaded.load()
    with pytest.raises(
        GPPError, match=r"modified by an inplace operation.*\(3, 4\) is at version 1; expected version 0"
    ):
        z.backward()


def test_a_change_after_it_has_left_changes_nothing() -> None:
    one, x = Recorded(), torch.randn(3, 4)
    with one.offloaded.recording([one.weight]):
        y = (x @ one.weight).exp()
        z = y.sum()
    expected = x.t() @ y.detach()
    one.offloaded.start()
    one.link.settle()
    y.detach().zero_()
    one.offloaded.load()
    z.backward()
    assert one.weight.grad is not None
    assert torch.equal(one.weight.grad, expected)


def test_reading_what_is_on_the_host_is_refused() -> None:
    one = Recorded()
    with one.offloaded.recording([one.weight]):
        y = (torch.randn(3, 4) @ one.weight).exp().sum()
    one.offloaded.start()
    one.link.settle()
    with pytest.raises(GPPError, match=r"read before it was loaded \(strategy.offload\)"):
        y.backward()


def test_after_a_failure_nothing_is_held_and_it_runs_again(notes: Notes) -> None:
    plan = offloading(replace(one_device(), schedule="gpipe"))
    first, sink = Mixer(plan, 0), Altered(plan, 1, LOSS, lambda loss: None)
    executor = executor_of(plan, [first, sink])
    with pytest.raises(GPPError, match="no loss"):
        executor.run()
    assert not first.tokens
    assert not notes.blocks
    sink.change = lambda loss: loss
    executor.run()
    assert first.weight.grad is not None
    assert not notes.blocks
