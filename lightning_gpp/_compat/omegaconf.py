"""Private names of OmegaConf."""

from __future__ import annotations

from omegaconf import DictConfig


def key_of(node: DictConfig) -> str:
    """The key of a node in the whole configuration (`trainer.callbacks`); empty for the configuration itself."""
    return str(node._get_full_key(""))
