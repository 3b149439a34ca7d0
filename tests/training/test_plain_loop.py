"""A plain loop over an engine gives the numbers of the same loop in one process (float64)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from gpp_examples import plain_loop
from gpp_examples.plain_loop import Batch, Branches, batches, loss_of
from lightning_gpp import ConfigError, Engine, Options, initialize
from tests.distributed import run_distributed
from tests.sampling import sample

State = dict[str, Any]

STAGES = {"left": 0, "right": 1, "head": 1}
CHAIN = {"left": 0, "right": 1, "head": 2}
SAVED_AFTER = 6
OTHERS = {"left": 0, "right": 0, "head": 1}


class Trained(Branches):
    """A module with steps of its own."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self, batch) * (1 + batch_idx)

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": loss_of(self, batch), "logits": self(batch[0], batch[1])}


def model_and_optimizer(kind: type[Branches] = Branches) -> tuple[Branches, AdamW]:
    torch.manual_seed(1)
    model = kind().double()
    return model, AdamW(model.parameters(), lr=0.01)


def plain(state: State) -> State:
    """Values as lists, for a pickle that is read in another process."""
    return {name: value.tolist() for name, value in state.items() if not value.is_meta}


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=1e-12, atol=1e-12)


def run_example(rank: int) -> tuple[list[float], State]:
    losses, weights = plain_loop.train(batches())
    return losses, plain(weights)


def alone(accumulated: int = 1, clip: float = 1.0) -> tuple[list[float], State]:
    model, optimizer = model_and_optimizer()
    losses = []
    for number, batch in enumerate(batches(), 1):
        loss = loss_of(model, batch)
        (loss / accumulated).backward()
        losses.append(loss.item())
        if number % accumulated == 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, plain(model.state_dict())


def test_losses_and_weights_are_those_of_one_process() -> None:
    (losses, weights), (same_losses, _) = run_distributed(2, run_example)
    expected_losses, expected_weights = alone()
    assert losses == same_losses == pytest.approx(expected_losses, rel=1e-12)
    assert_same(weights, expected_weights)


def accumulate(rank: int, sharding: str) -> tuple[list[float], list[str], State]:
    """Two pipelines, which share the samples: losses, names of this rank's parameters, and the module at the end."""
    model, optimizer = model_and_optimizer()
    options = Options(stages=STAGES, num_micro_batches=2, num_pipelines=2, sharding=sharding)
    losses = []
    half = slice(16 * (rank // 2), 16 * (rank // 2) + 16)
    with initialize(model, optimizer, [part[half] for part in batches()[0]], step=loss_of, options=options) as engine:
        held = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
        for number, batch in enumerate(batches(), 1):
            last = number % 2 == 0
            losses.append(float(engine.train_step([part[half] for part in batch], accumulated=2, last=last)))
            if last:
                engine.clip_grad_norm(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return losses, held, plain(model.state_dict())


@pytest.mark.parametrize("sharding", sample(["none", "zero1"], ["zero1"]))
def test_pipelines_that_accumulate_gradients(sharding: str) -> None:
    found = run_distributed(4, accumulate, sharding)
    expected_losses, expected_weights = alone(accumulated=2)
    means = [(first + second) / 2 for first, second in zip(found[0][0], found[2][0], strict=True)]
    assert means == pytest.approx(expected_losses, rel=1e-12)
    assert {name.partition(".")[0] for name in found[1][1]} == {"left"}
    assert {name.partition(".")[0] for name in found[0][1]} == {"right", "head"}
    assert_same(found[0][2], expected_weights)


def step(engine: Engine, optimizer: AdamW, data: list[Batch]) -> list[float]:
    losses = []
    for batch in data:
        losses.append(float(engine.train_step(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def interrupted(rank: int, folder: str) -> tuple[list[float], State, str]:
    """Half of a run, saved by rank 0; the other half by other stages, from what all ranks load."""
    data, losses, refusal = batches(), [], ""
    model, optimizer = model_and_optimizer()
    with initialize(model, optimizer, data[0], step=loss_of, options=Options(stages=STAGES)) as engine:
        losses += step(engine, optimizer, data[:10])
        state = {"model": engine.state_dict(), "optimizer": engine.optimizer_state_dict(optimizer)}
        if rank == 0:
            torch.save(state, f"{folder}/checkpoint")
    dist.barrier()
    model, optimizer = model_and_optimizer()
    with initialize(model, optimizer, data[0], step=loss_of, options=Options(stages=OTHERS)) as engine:
        state = torch.load(f"{folder}/checkpoint")
        engine.load_state_dict(state["model"])
        engine.load_optimizer_state_dict(optimizer, state["optimizer"])
        losses += step(engine, optimizer, data[10:])
        try:
            engine.optimizer_state_dict(AdamW(model.parameters()))
        except ConfigError as error:
            refusal = str(error)
    return losses, plain(model.state_dict()), refusal


def test_checkpoints_are_those_of_one_process(tmp_path: Any) -> None:
    (losses, weights, refusal), _ = run_distributed(2, interrupted, str(tmp_path))
    expected_losses, expected_weights = alone(clip=torch.inf)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert_same(weights, expected_weights)
    assert "The AdamW is not one of the optimizers that the engine was set up with" in refusal
    saved = torch.load(tmp_path / "checkpoint")
    fresh, other = model_and_optimizer()
    fresh.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])


def resumed_without_flush(rank: int, folder: str, weights: str) -> tuple[list[float], State]:
    """Mini-batches in a pipeline that does not flush: all of them, or those after a checkpoint if there is one."""
    file, data, options = Path(folder) / "checkpoint", batches(), Options(stages=CHAIN, weights=weights)
    losses = list[float]()
    model, optimizer = model_and_optimizer()
    with initialize(model, optimizer, data[0], step=loss_of, options=options) as engine:
        first = 0
        if file.exists():
            state, first = torch.load(file), SAVED_AFTER
            engine.load_state_dict(state["model"])
            engine.load_optimizer_state_dict(optimizer, state["optimizer"])
            engine.load_pipeline_state_dict(state["pipeline"])
        for number, batch in enumerate(engine.feed(data[first:]), first + 1):
            losses.append(float(engine.train_step(batch)))
            optimizer.step()
            optimizer.zero_grad()
            if number == SAVED_AFTER:
                parts = engine.state_dict(), engine.optimizer_state_dict(optimizer), engine.pipeline_state_dict()
                if rank == 0:
                    torch.save(dict(zip(("model", "optimizer", "pipeline"), parts, strict=True)), file)
    return losses, plain(model.state_dict())


def test_checkpoints_without_a_flush_resume_bit_for_bit(tmp_path: Any) -> None:
    whole, rest = (run_distributed(3, resumed_without_flush, str(tmp_path), "double_buffer") for _ in range(2))
    assert rest[0][0] == whole[0][0][SAVED_AFTER:]
    assert rest[0][1] == whole[0][1]
    assert set(torch.load(tmp_path / "checkpoint")["model"]) == set(Branches().state_dict())


def evaluated(rank: int) -> list[list[State]]:
    """The results of mini-batches alone, those of a pass over a feed, and of a pass after half of another; and of one
    mini-batch twice, in the middle of training."""
    data = batches()
    model, optimizer = model_and_optimizer(Trained)
    options = Options(stages=STAGES, num_micro_batches=2, weights="stash")
    with initialize(model, optimizer, data[0], options=options) as engine:
        alone = [engine.evaluate(batch) for batch in data]
        streamed = [engine.evaluate(batch) for batch in engine.feed(data, "validation_step")]
        for number, batch in enumerate(engine.feed(data, "validation_step")):
            engine.evaluate(batch)
            if number == 1:
                break
        again = [engine.evaluate(batch) for batch in engine.feed(data, "validation_step")]
        for batch in engine.feed(data[:4]):
            engine.train_step(batch)
            optimizer.step()
            optimizer.zero_grad()
            twice = [engine.evaluate(data[0]), engine.evaluate(data[0])]
    return [[plain(result) for result in results if result] for results in (alone, streamed, again, twice)]


def test_evaluation_streams() -> None:
    (alone, streamed, again, twice), nothing = run_distributed(2, evaluated)
    assert streamed == alone
    assert again == alone
    assert len(alone) == len(batches())
    assert not any(nothing)
    assert twice[:1] == twice[1:]
    assert twice[0] != alone[0]


def test_without_processes() -> None:
    model, optimizer = model_and_optimizer()
    with (
        pytest.raises(ConfigError, match="no process group yet: call torch.distributed.init_process_group"),
        initialize(model, optimizer, batches()[0], step=loss_of),
    ):
        pass
