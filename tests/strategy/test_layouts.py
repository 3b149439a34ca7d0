"""Settings that lay stages out: what excludes what is said before there is a model."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpp import GPPStrategy
from lightning_gpp.errors import ConfigError
from tests.strategies import chain


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"schedule": "zbv", "max_replicas": 2}, r"'zbv' puts every stage on one device.*num_pipelines.*1f1b"),
        ({"schedule": "1f1b", "stages_per_device": 2, "max_replicas": 3}, "puts every stage on one device"),
        (
            {"schedule": "chimera", "stages": [{"modules": ["a"], "devices": [0]}, {"modules": ["b"], "devices": [1]}]},
            r"'chimera' gives every stage a second device.*leave `devices` out",
        ),
        ({"stages_per_device": 0}, "strategy.stages_per_device is 0; it must be a whole number >= 1"),
        (
            {"stages_per_device": 2, "stages": [{"modules": ["a"], "devices": [0]}, {"modules": ["b"]}]},
            "strategy.stages_per_device=2 cannot move .* `devices`: these already have devices. Leave it out",
        ),
        (
            {"stages_per_device": 2, "plan": chain([1, 1], 4)},
            "per_device=2 cannot move the stages of strategy.plan",
        ),
        ({"sharding": "zero2"}, "strategy.sharding is 'zero2'; it must be one of 'none', 'auto', 'zero1', 'fsdp'"),
    ],
)
def test_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        GPPStrategy(**settings)
