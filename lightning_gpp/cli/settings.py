"""The types of the keys of `gpp-train` and `gpp-plan` that are in no group."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.errors import ConfigError
from lightning_gpp.validation import validated

ConfigGroup = dict[str, Any]
PositiveNumber = Annotated[float, Gt(0)]
Seed = Annotated[int, Ge(0), Lt(2**32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLevelKeys:
    """The keys of both commands. `step` and `batch_size` are checked where they are used."""

    trainer: ConfigGroup
    strategy: ConfigGroup
    data: ConfigGroup | None = None
    model: ConfigGroup | None = None
    seed: Seed | None = None
    train: bool = True
    test: bool = True
    compare: bool = False
    ckpt_path: str | None = None
    optimized_metric: str | None = None
    graph: str | None = None
    optimizer: str | None = None
    compare_seconds: PositiveNumber = 120
    output: str | None = None
    trace: str | None = None
    svg: str | None = None
    graph_svg: str | None = None
    report: str | None = None


def check_settings(config: DictConfig) -> None:
    """Refuse values of the wrong type.

    Raises:
        ConfigError: with the key, its value and what is allowed.
    """
    content: Any = OmegaConf.to_container(config)
    validated(TopLevelKeys, _known(TopLevelKeys, content), error=ConfigError)


def _known(kind: type, content: dict[str, Any]) -> dict[str, Any]:
    """The values of the keys that a dataclass has, without references to other keys."""
    given = {field.name: content[field.name] for field in fields(kind) if field.name in content}
    return {key: value for key, value in given.items() if not (isinstance(value, str) and "${" in value)}
