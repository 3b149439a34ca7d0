"""The places that a run writes to: one that cannot be written ends the run with the key that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.cli.blame import logged, mistake
from lightning_gpp.errors import ConfigError


def check_folder(path: str) -> None:
    """Refuse a run folder that cannot be made, before anything is built.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"paths.output_dir={path} cannot be made: {error.strerror}. Choose another folder."
        ) from error


@rank_zero_only
def begin_outputs(config: DictConfig, trainer: L.Trainer) -> None:
    """Let loggers begin, and make folders of checkpoints and reports, before other processes are started.

    Raises:
        ConfigError: a logger cannot begin, or a folder cannot be made.
    """
    nodes = [node for node in config.logger.values() if node is not None]
    for node, logger in zip(nodes, trainer.loggers, strict=False):  # fast_dev_run has a single one that does nothing
        try:
            getattr(logger, "experiment", None)
        except Exception as error:
            raise mistake(node, error, " when it began") from error
    with naming_places(config):
        for folder in _folders(trainer):
            Path(folder).mkdir(parents=True, exist_ok=True)


def _folders(trainer: L.Trainer) -> list[str]:
    """Local folders of checkpoints and reports."""
    from lightning_gpp.cli.run_report import RunReport  # takes seconds to load, which refusals should not wait for

    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    reports = [str(callback.folder) for callback in callbacks if isinstance(callback, RunReport)]
    saved = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    return [*reports, *(str(folder) for folder in saved if folder and "://" not in str(folder))]


@contextmanager
def naming_places(config: DictConfig) -> Iterator[None]:
    """Inside, errors of files and folders that a key of the configuration names raise ConfigError with the key."""
    try:
        yield
    except OSError as error:
        key = _key_of_place(config, error)
        if key is None:
            raise
        raise ConfigError(
            f"{key} does not work: {error.filename}: {error.strerror}. Choose another place. {logged(error)}".rstrip()
        ) from error


def _key_of_place(config: DictConfig, error: OSError) -> str | None:
    """KEY=VALUE of the longest path at, above or below the error's."""
    if not isinstance(error.filename, str):
        return None
    failed = Path(error.filename).absolute()
    places = {text: Path(text.partition("=")[2]).absolute() for text in _paths(config)}
    above = [text for text, place in places.items() if failed.is_relative_to(place)]
    below = [text for text, place in places.items() if place.is_relative_to(failed)]
    return max(above or below, key=lambda text: len(places[text].parts), default=None)


def _paths(config: DictConfig, path: str = "") -> Iterator[str]:
    """KEY=VALUE of the values with a slash that are given as they are, and the run folder's."""
    for key in map(str, config):
        if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
            continue
        name, value = f"{path}{key}", config[key]
        if isinstance(value, DictConfig):
            yield from _paths(value, f"{name}.")
        elif isinstance(value, str) and "/" in value and "://" not in value:
            yield f"{name}={value}"
    if not path:
        yield f"hydra.run.dir={config.paths.output_dir}"
