"""Values that the step logs: recorded by one rank, combined as they reduce."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_gpp import ConfigError
from lightning_gpp.strategy.logs import LogRecorder
from tests.strategy.harness import TwoTowers, make_module


def test_a_metric_that_is_no_attribute() -> None:
    module = make_module()
    recorder = LogRecorder(module)
    with recorder.run(1), pytest.raises(ConfigError, match="MeanMetric that is not an attribute of the module"):
        module.log("mean", MeanMetric())


def test_logged_values_combine_as_they_reduce() -> None:
    module = make_module()
    recorder = LogRecorder(module)
    for samples, value in ((2, 1.0), (6, 3.0)):
        with recorder.run(samples):
            module.log("mean", value)
            module.log("sum", torch.tensor(value), reduce_fx="sum")
            module.log("max", value, reduce_fx=torch.max)
            module.log("min", value, reduce_fx="min")
            module.log("own size", value, batch_size=1)
            module.log("tokens", value, batch_size=5 * samples)
    with pytest.raises(KeyError), recorder.run(1):
        log_and_fail(module)  # a run that does not end counts for nothing
    found = {call.name: values.combined(call.reduction) for call, values in recorder.calls.items()}
    numbers = {name: (float(value), samples) for name, (value, samples) in found.items()}
    assert numbers == {
        "mean": (2.5, 8),
        "sum": (4.0, 8),
        "max": (3.0, 8),
        "min": (1.0, 8),
        "own size": (2.5, 1),
        "tokens": (2.5, 40),
    }


def test_means_that_only_some_runs_logged() -> None:
    module = make_module()
    recorder = LogRecorder(module)
    for number in range(2):
        with recorder.run(4):
            module.log("all", 1.0)
            if number:
                module.log("some", 1.0)
                module.log("with its count", 1.0, batch_size=3)
                module.log("sum", 1.0, reduce_fx="sum")
    assert recorder.record.means_of_some() == ["some"]


def log_and_fail(module: TwoTowers) -> None:
    module.log("mean", 100.0)
    raise KeyError
