"""Private names of OmegaConf."""

from __future__ import annotations

from omegaconf import DictConfig


def key_of(node: DictConfig) -> str:
    """The key of a node in the whole configuration (`trainer.callbacks`); empty for the configuration itself."""
    return str(node._get_full_key(""))


def raw_value(node: DictConfig, key: str) -> str:
    """The value of a key as it is written, with references in place of what they stand for."""
    return str(node._get_node(key))
