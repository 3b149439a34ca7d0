"""Private names of OmegaConf do what the library relies on."""

from __future__ import annotations

from omegaconf import OmegaConf

from lightning_gpp._compat.omegaconf import key_of


def test_key_of() -> None:
    config = OmegaConf.create({"trainer": {"callbacks": {"stop": {"patience": 3}}}})
    assert key_of(config.trainer.callbacks.stop) == "trainer.callbacks.stop"
    assert key_of(config) == ""
