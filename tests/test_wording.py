"""Messages name settings in the words of whoever has made them."""

from __future__ import annotations

import pytest

from lightning_gpp import GPPStrategy
from lightning_gpp.errors import ConfigError
from lightning_gpp.wording import WORDS, spoken


@pytest.mark.parametrize(
    ("setting", "python"),
    [
        ("strategy.step=whole.", 'GPPStrategy(step="whole").'),
        ("(strategy.stages)", "(GPPStrategy's stages)"),
        ("strategy.schedule=1f1b, or", 'GPPStrategy(schedule="1f1b"), or'),
        ("strategy.self_check=false", "GPPStrategy(self_check=False)"),
        ("strategy.memory_headroom=0.25.", "GPPStrategy(memory_headroom=0.25)."),
        ("strategy.sharding='fsdp'", 'GPPStrategy(sharding="fsdp")'),
        ("strategy.batch_dims={x.y: 1, w: null}", 'GPPStrategy(batch_dims={"x.y": 1, "w": None})'),
        ("strategy.loss_reduction=mask:except0", 'GPPStrategy(loss_reduction="mask:except0")'),
        ("trainer.strategy.report(path)", "trainer.strategy.report(path)"),
        ("trainer.devices=4", "trainer.devices=4"),
    ],
)
def test_settings_are_named_as_they_are_made(setting: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spoken(setting) == setting
    monkeypatch.delenv(WORDS)
    assert spoken(setting) == python


def test_errors_speak_python_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORDS)
    with pytest.raises(ConfigError, match=r'Use GPPStrategy\(sharding="zero1"\)') as caught:
        GPPStrategy(sharding="fsdp", weights="stash")
    assert "strategy." not in str(caught.value)
