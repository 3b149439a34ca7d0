"""Steps that read iterators of the module get the items that they get in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.errors import CaptureError
from tests.strategy import harness


def samples(number: int, seed: int) -> Tensor:
    return torch.randn(number, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def endless(seed: int) -> Iterator[Tensor]:
    while True:
        yield from samples(64, seed).split(8)
        seed += 1


class Semi(pl.LightningModule):
    """Unlabelled samples from a generator, weights from a list's iterator, noise from a loader that starts anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.unlabelled = endless(1)
        self.sources: dict[str, list[Iterator[Any]]] = {"weights": [iter([0.1 * number for number in range(100)])]}
        self.loader = DataLoader(TensorDataset(samples(12, 2)), batch_size=4)
        self.noise = iter(self.loader)
        self.losses: list[float] = []

    def more(self) -> Tensor:
        try:
            (noise,) = next(self.noise)
        except StopIteration:
            self.noise = iter(self.loader)
            (noise,) = next(self.noise)
        return noise

    def step(self, batch: list[Tensor]) -> Tensor:
        labelled = self.head(self.body(batch[0]).tanh()).square().mean()
        other = self.head(self.body(next(self.unlabelled)).tanh()).abs().mean()
        return labelled + next(self.sources["weights"][0]) * other + self.more().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(devices: int) -> list[float]:
    several = harness.strategy(stages={"body": 1, "head": 0}, step="whole", num_micro_batches=2)
    trainer = harness.trainer(several if devices > 1 else "auto", devices, max_epochs=2)
    model, loader = Semi().double(), DataLoader(TensorDataset(samples(24, 3)), batch_size=8)
    trainer.fit(model, loader, loader)
    return [*model.losses, float(trainer.callback_metrics["val_loss"])]


def trained_in_stages(rank: int) -> list[float]:
    return trained(2)


def test_training_reads_what_it_reads_in_one_process() -> None:
    expected = trained(1)
    found, _ = harness.run(2, trained_in_stages)
    assert found == pytest.approx(expected, rel=1e-12)


class Elsewhere(Semi):
    """Reads a generator that no attribute of a module is."""

    def step(self, batch: list[Tensor]) -> Tensor:
        return self.head(self.body(batch[0]).tanh()).mean() + self.head(self.body(next(GENERATORS[0])).tanh()).mean()


GENERATORS = (endless(1),)


def trained_elsewhere(rank: int) -> None:
    strategy = harness.strategy(stages={"body": 0, "head": 1}, step="whole", num_micro_batches=2, self_check=False)
    trainer = harness.trainer(strategy, 2, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(Elsewhere().double(), DataLoader(TensorDataset(samples(24, 3)), batch_size=8))


def test_what_was_made_in_a_capture_and_kept_elsewhere_is_told() -> None:
    with pytest.raises(AssertionError, match="kept since by something that set-up does not know, such as a generator"):
        harness.run(2, trained_elsewhere)


def refused(rank: int) -> str:
    strategy = harness.strategy(stages={"body": 0, "head": 0}, step="micro_batches", num_micro_batches=2)
    loader = DataLoader(TensorDataset(samples(24, 3)), batch_size=8)
    with pytest.raises(CaptureError) as caught:
        harness.trainer(strategy, 1, num_sanity_val_steps=0).fit(Semi().double(), loader, loader)
    return str(caught.value)


def test_micro_batches_would_read_items_of_their_own() -> None:
    (said,) = harness.run(1, refused)
    assert "training_step reads items of an iterator that the module keeps" in said
    assert "(unlabelled, sources.weights.0, noise)" in said
    assert "strategy.step=whole" in said


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.same = iter(range(6))


def test_copies_leave_everything_to_the_module() -> None:
    module = Holder()
    first, second = private_copy(module), private_copy(module)
    assert [next(first.numbers), next(first.numbers), next(second.same), next(module.numbers)] == [0, 1, 0, 0]
    further = copy.deepcopy(first)
    assert [next(further.numbers), next(first.same), next(second.numbers)] == [2, 2, 1]
    assert list(module.same) == [1, 2, 3, 4, 5]
    assert list(first.numbers) == []


def test_iterators_keep_their_length_and_truth() -> None:
    module = Holder()
    loader = DataLoader(TensorDataset(samples(12, 2)), batch_size=4)
    module.numbers, module.same = iter(loader), endless(1)
    copied = private_copy(module)
    assert len(module.numbers) == len(copied.numbers) == 3
    assert module.same
    assert copied.same
    with pytest.raises(TypeError, match="no len"):
        len(module.same)


class Numbers(Iterator[int]):
    """An iterator of the user's own class."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def take(self, number: int) -> list[int]:
        return [next(self) for _ in range(number)]


def test_iterators_are_of_their_class_and_can_be_pickled() -> None:
    module = Holder()
    module.numbers = Numbers()
    copied = private_copy(module)
    assert isinstance(module.numbers, Numbers)
    assert isinstance(copied.numbers, Numbers)
    assert [next(copied.numbers), copied.numbers.at, next(module.numbers)] == [1, 1, 1]
    next(copied.numbers)
    assert next(pickle.loads(pickle.dumps(module.numbers))) == 2


@pytest.mark.parametrize(
    ("made", "call"),
    [(Numbers, lambda numbers: numbers.take(2)), (lambda: endless(1), lambda numbers: numbers.send(None))],
    ids=["take", "send"],
)
def test_other_calls_than_next_are_refused_in_copies(made: Any, call: Any) -> None:
    module = Holder()
    module.numbers = made()
    copied = private_copy(module)
    with pytest.raises(CaptureError, match=r"calls \.(take|send)\(\) of an iterator"):
        call(copied.numbers)
    assert call(module.numbers) is not None


def test_files_are_written_but_not_read_in_copies(tmp_path: Path) -> None:
    module = Holder()
    with (tmp_path / "lines").open("w+") as module.file:
        copied = private_copy(module)
        module.file.write("1\n2\n")
        assert copied.file.write("3\n") == 2
        module.file.seek(0)
        for read in (next, list, lambda file: file.readline(), lambda file: file.read()):
            with pytest.raises(CaptureError, match=r"The step reads the open file .*csv\.reader"):
                read(copied.file)
        assert list(module.file) == ["1\n", "2\n"]


class Writing(pl.LightningModule):
    """Writes its losses into a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.file = nn.Linear(4, 8), nn.Linear(8, 1), path.open("w")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.head(self.body(batch[0]).tanh()).square().mean()
        self.file.write(f"{loss.item():.9f}\n")
        return loss

    def on_train_end(self) -> None:
        self.file.close()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def written(folder: Path, rank: int = 0, **options: Any) -> list[float]:
    several = harness.strategy(stages={"body": 1, "head": 0}, num_micro_batches=2, **options) if options else "auto"
    path = folder / f"{options.get('step')}{rank}"
    trainer = harness.trainer(several, 2 if options else 1, max_epochs=1)
    trainer.fit(Writing(path).double(), DataLoader(TensorDataset(samples(24, 3)), batch_size=8))
    return [float(line) for line in path.read_text().splitlines()]


def written_in_stages(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    return written(folder, rank, step="whole"), written(folder, rank, step="micro_batches")


def test_a_step_writes_to_a_file_what_it_writes_in_one_process(tmp_path: Path) -> None:
    expected = written(tmp_path)
    whole, parts = harness.run(2, written_in_stages, tmp_path)[0]
    assert whole == pytest.approx(expected, abs=1e-8)
    means = [(first + second) / 2 for first, second in zip(parts[::2], parts[1::2], strict=True)]
    assert means == pytest.approx(expected, abs=1e-8)


def test_what_is_drawn_ahead_follows_the_users_seed() -> None:
    def drawing() -> Iterator[float]:
        while True:
            yield torch.rand(()).item()

    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        module = Holder()
        module.numbers = drawing()
        copied = private_copy(module)
        torch.manual_seed(99)
        found.append([next(copied.numbers), next(module.numbers)])
        assert torch.rand(()).item() == torch.rand((), generator=torch.Generator().manual_seed(99)).item()
    assert found[0] == found[1] != found[2]
    assert all(one == other for one, other in found)
