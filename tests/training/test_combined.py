"""The results of a step on micro-batches become those on the mini-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.training.runner import combined

PARTS = (0, 1, 2), (3, 4)


def result(samples: tuple[int, ...]) -> dict[str, Any]:
    """What a step returns for these samples."""
    return {
        "labels": list(samples),
        "names": tuple(f"sample {each}" for each in samples),
        "rows": torch.tensor(samples).unsqueeze(1),
        "array": np.array(samples),
        "pair": [torch.tensor(samples), torch.tensor(float(np.mean(samples)))],
        "count": len(samples),
        "correct": torch.tensor(samples).gt(1).sum(),
        "found": torch.tensor([each for each in samples if each % 2 or each == 4]),
        "mean": float(np.mean(samples)),
        "flag": True,
        "nothing": None,
    }


def test_as_for_the_undivided_mini_batch() -> None:
    starts = 0, 3
    parts = [
        (MicroBatch(index=index, start=start, stop=start + len(samples), total=5), result(samples))
        for index, (start, samples) in enumerate(zip(starts, PARTS, strict=True))
    ]
    found, expected = combined(parts), result((0, 1, 2, 3, 4))
    for name in ("labels", "names", "count", "flag", "nothing"):
        assert found[name] == expected[name], name
        assert type(found[name]) is type(expected[name]), name
    assert found["mean"] == pytest.approx(expected["mean"])
    for name in ("rows", "correct"):
        assert found[name].equal(expected[name]), name
    assert found["pair"][0].equal(expected["pair"][0])
    assert float(found["pair"][1]) == pytest.approx(2.0)
    assert [part.tolist() for part in found["found"]] == [[1], [3, 4]]
    np.testing.assert_array_equal(found["array"], expected["array"])
