"""8-bit edges: evaluation on real processes with less on the wire, a measured error, and exact training."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpp import GPPStrategy
from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.transport import DistributedTransport, Work
from tests.sampling import sample
from tests.strategy import harness

STAGES = [
    {"name": "image", "modules": ["left"], "devices": [2]},
    {"name": "text", "modules": ["right"], "devices": [1]},
    {"name": "head", "modules": ["head", "@step"], "devices": [0]},
]
REPLICATED = [
    {"name": "image", "modules": ["left"], "devices": [2, 3]},
    {"name": "text", "modules": ["right"], "devices": [1], "micro_batch_size": 4},
    {"name": "head", "modules": ["head", "@step"], "devices": [0]},
]
WIDTH = 32
SEND = DistributedTransport.send


class Wire:
    """Counts the bytes that this process sends to each device."""

    def __init__(self) -> None:
        self.bytes: Counter[int] = Counter()
        wire = self

        def send(transport: DistributedTransport, tensor: Tensor, device: int) -> Work:
            wire.bytes[device] += tensor.numel() * tensor.element_size()
            return SEND(transport, tensor, device)

        DistributedTransport.send = send  # type: ignore[method-assign]


class Messages(logging.Handler):
    """Keeps what the strategy tells its user about 8-bit edges."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "8-bit edges" in record.getMessage():
            self.texts.append(record.getMessage())


def all_predicted(rank: int, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [predicted(rank, settings) for settings in runs]


def predicted(rank: int, settings: dict[str, Any], stages: Any = STAGES, world_size: int = 3) -> dict[str, Any]:
    wire, messages = Wire(), Messages()
    given = {"num_micro_batches": 4, "failure_timeout": 60.0, "timeout": 120.0, **settings}
    trainer = harness.trainer(GPPStrategy(stages=stages, **given), devices=world_size)
    predictions = trainer.predict(harness.make_module(width=WIDTH), harness.loader(24))
    values = None if rank else torch.cat([p for p in predictions or [] if isinstance(p, Tensor)])
    return {"values": values, "bytes": dict(wire.bytes), "messages": [*messages.texts]}


def test_predictions_change_by_as_much_as_the_user_is_told() -> None:
    plain, one = {"self_check": False}, {"self_check": False, "eight_bit_edges": ["image -> head"]}
    checked = {"eight_bit_edges": True}
    runs = zip(*harness.run(3, all_predicted, [plain, one, {**plain, **checked}, checked]), strict=True)
    exact, first, coded, told = runs
    difference = (coded[0]["values"] - exact[0]["values"]).abs().max().item()
    assert 1e-6 < difference < 0.02
    assert coded[0]["messages"] == []
    assert torch.equal(told[0]["values"], coded[0]["values"])
    (text,) = told[0]["messages"]
    assert text.startswith(
        "8-bit edges (image -> head, text -> head) send 192 B instead of 1 KiB for a micro-batch of 2"
    )
    assert float(text.split("at most ")[1].split(",")[0]) <= difference  # the first micro-batch is one of twelve
    assert 0.01 < float(text.split("norm by ")[1].rstrip("%.")) < 2
    whole, row = 24 * WIDTH * 8, 24 * (WIDTH + 16)  # a row of bytes for each sample
    assert [result["bytes"].get(0, 0) for result in exact] == [0, whole, whole]
    assert [result["bytes"].get(0, 0) for result in first] == [0, whole, row]
    replicas = harness.run(4, predicted, {**plain, "eight_bit_edges": ["*"]}, REPLICATED, 4)
    torch.testing.assert_close(replicas[0]["values"], coded[0]["values"], rtol=0, atol=1e-12)


def fitted(rank: int, weights: str) -> list[dict[str, Any]]:
    return [fitted_once(eight_bit, weights) for eight_bit in (False, ["left", "right"])]


def fitted_once(eight_bit: Any, weights: str) -> dict[str, Any]:
    messages = Messages()
    module = harness.make_module(width=WIDTH)
    strategy = harness.strategy(stages=STAGES, eight_bit_edges=eight_bit, weights=weights)
    harness.trainer(strategy, devices=3, max_epochs=1).fit(module, harness.loader(24), harness.loader(16))
    return {"losses": module.losses, "validated": module.metrics[-1]["val_loss"], "messages": len(messages.texts)}


@pytest.mark.parametrize("weights", sample(["synchronous", "stash"], ["synchronous"]))
def test_training_is_exact(weights: str) -> None:
    exact, coded = zip(*harness.run(3, fitted, weights), strict=True)
    assert coded[0]["losses"] == exact[0]["losses"]
    assert 0 < abs(coded[0]["validated"] - exact[0]["validated"]) < 0.01
    assert [result["messages"] for result in coded] == [1, 0, 0]


def refused(rank: int, patterns: list[str]) -> str:
    here = [{**stage, "devices": [0]} for stage in STAGES]
    with pytest.raises(ConfigError) as error:
        predicted(rank, {"eight_bit_edges": patterns}, here, 1)
    return str(error.value)


def test_a_pattern_without_an_edge_is_refused() -> None:
    (text,) = harness.run(1, refused, ["data -> image", "left -> *", "image -> text"])
    assert "'image -> text' matches no edge of the plan" in text
    assert "There are: data -> image, data -> text, image -> head, text -> head." in text


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="eight_bit_edges is 'image'; it must be true, false, or a list of patterns"):
        GPPStrategy(eight_bit_edges="image")  # type: ignore[arg-type]
