from __future__ import annotations

import pytest

from lightning_gpp.costs.model import Footprint
from lightning_gpp.errors import ConfigError


@pytest.mark.parametrize(
    ("optimizer", "precision", "copies"),
    [
        ("none", "32-true", 2),
        ("sgd", "32-true", 2),
        ("sgd_momentum", "32-true", 3),
        ("adamw", "32-true", 4),
        ("adamw", "bf16-true", 4),  # of parameters that have half the bytes themselves
        ("sgd", "bf16-mixed", 2.5),
    ],
)
def test_copies(optimizer: str, precision: str, copies: float) -> None:
    assert Footprint(optimizer=optimizer, precision=precision).copies == copies


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer": "adamv"},
            r"^optimizer='adamv' is unknown; choose one of none, .*adamw. Did you mean 'adam",
        ),
        ({"precision": "bf16_mixed"}, "trainer.precision='bf16_mixed' is unknown.* Did you mean 'bf16-mixed'"),
    ],
)
def test_unknown_names_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Footprint(**settings)  # type: ignore[arg-type]
