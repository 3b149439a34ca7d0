"""Errors of configured objects before training: one paragraph with the key, its values, and the place in the code."""

from __future__ import annotations

import inspect
import logging
import sysconfig
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any, Final

from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpp._compat.omegaconf import key_of
from lightning_gpp._compat.torch import pytree
from lightning_gpp.cli.log_file import place_of_traceback
from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.validation import shown

SETTING_UP: Final = frozenset(
    {"prepare_data", "setup", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
    | {"configure_model", "configure_optimizers", "configure_callbacks"}
)
"""Methods that run before the first step. An error in a step is a bug more often than a wrong setting, and shows its
traceback.
"""

_PACKAGE: Final = Path(__file__).parents[1]
_LIBRARIES: Final = (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib")), _PACKAGE)


def of_kind(node: DictConfig, built: Any, kind: type) -> Any:
    """The object that the node describes.

    Raises:
        ConfigError: it is not of this kind.
    """
    if not isinstance(built, kind):
        raise ConfigError(f"{key_of(node)}._target_={node._target_} is no {kind.__name__}.")
    return built


def guarded(node: DictConfig, built: Any, kind: type) -> Any:
    """The object that the node describes, whose methods of set-up raise ConfigError for whatever fails in them.

    Raises:
        ConfigError: it is not of this kind.
    """
    of_kind(node, built, kind)
    for name in SETTING_UP:
        function = getattr(type(built), name, None)
        if inspect.isfunction(function):
            vars(built)[name] = MethodType(_guard(function, node), built)  # a bound method stays one in deep copies
    return built


def _guard(function: Callable[..., Any], node: DictConfig) -> Callable[..., Any]:
    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = function(self, *args, **kwargs)
        except (GPPError, MisconfigurationException):
            raise
        except Exception as error:
            raise mistake(node, error, f" in {function.__name__}") from error
        if function.__name__.endswith("_dataloader"):
            _check_loaders(result, f"{type(self).__name__}.{function.__name__}")
        if function.__name__ == "configure_optimizers" and isinstance(result, dict) and "optimizer" not in result:
            raise ConfigError(
                f"{type(self).__name__}.configure_optimizers returned a dict with the keys {list(result)}. The key of "
                "the optimizer is 'optimizer'."
            )
        return result

    return run


def _check_loaders(loaders: Any, name: str) -> None:
    """Refuse what the method `name` returned if there is something without mini-batches in it."""
    for loader in pytree.tree_leaves(getattr(loaders, "iterables", loaders)):
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise ConfigError(
                f"{name} returned {shown(loaders)}. Let it return a torch.utils.data.DataLoader or another iterable of "
                "mini-batches, or several of them in a list or dict."
            )
        if name.endswith(".train_dataloader") and isinstance(loader, DataLoader) and _is_empty(loader):
            raise ConfigError(
                f"{name} has no mini-batch: its dataset is empty, or has fewer samples than a batch, and "
                "drop_last=True."
            )


def _is_empty(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.dataset, IterableDataset) and len(loader) == 0


def mistake(node: DictConfig, error: BaseException, where: str = "") -> ConfigError:
    """The error of an object as a mistake in the node that describes it."""
    values = ", ".join(f"{name}={node[name]}" for name in map(str, node) if not name.startswith("_"))
    return ConfigError(
        f"{key_of(node) or 'configuration'} ({node._target_}) does not work with its settings"
        f"{f' ({values})' if values else ''}: {type(error).__name__}{where}: {_sentence(error)}{_place(error)}. "
        f"{logged(error)}".rstrip()
    )


def refusal(settings: str, error: BaseException, remedy: str = "") -> ConfigError:
    """The error for settings that Lightning refuses."""
    return ConfigError(f"Lightning refuses {settings}: {_sentence(error)}{remedy}")


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())


def _place(error: BaseException) -> str:
    """The innermost line outside of libraries."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(each) for each in _LIBRARIES)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def logged(error: BaseException) -> str:
    """Write the traceback to the run folder's log, and say so."""
    if not HydraConfig.initialized():
        return ""
    logging.getLogger(__name__).warning("the error's traceback", exc_info=error)
    return place_of_traceback()
