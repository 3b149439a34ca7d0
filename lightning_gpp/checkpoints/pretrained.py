"""Values from safetensors files, as Hugging Face has them: of a model without memory a rank reads its own part only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_gpp.errors import CheckpointError, ConfigError
from lightning_gpp.wording import some

_ATTRIBUTE: Final = "_gpp_pretrained"
"""The attribute of a parameter without memory that says where its value is."""
_INDEX: Final = "*.safetensors.index.json"
_SHOWN: Final = 5
"""Names in an error."""


@dataclass(frozen=True, slots=True)
class _FileTensor:
    """A tensor in a file."""

    file: Path
    key: str
    shape: tuple[int, ...]

    def fill(self, tensor: Tensor) -> None:
        """Read it into a tensor of the same shape."""
        with _opened(self.file) as file, torch.no_grad():
            tensor.copy_(file.get_tensor(self.key))


def load_pretrained(
    module: nn.Module, path: str | Path, *, rename: Callable[[str], str | None] | None = None, strict: bool = True
) -> None:
    """Give a module the values in safetensors files.

        def configure_model(self):
            with lightning_gpp.parameters_on_meta():
                self.net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            lightning_gpp.load_pretrained(self.net, folder)

    Parameters on the meta device are read when `GPPStrategy` or `initialize` has a plan, each by the ranks that use it,
    so that no process needs memory for the whole model; all others, and buffers, are read now. A checkpoint that the
    run resumes from (`ckpt_path`) goes first.

    Args:
        module: the module, or a part of one; its state dict has the names.
        path: a file, or a folder of files, with an index or without.
        rename: returns the name for a key of the files, or None to leave it out. Default: the key itself.
        strict: whether each tensor of the module must be in the files, and each of theirs in the module.

    Raises:
        CheckpointError: files, names or shapes do not fit.
        ConfigError: the package safetensors is missing.
    """
    values = _renamed(_values_in(Path(path)), rename, path)
    tensors: dict[str, Tensor] = {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    found = {id(tensor): values[name] for name, tensor in tensors.items() if name in values}
    if strict:
        absent = [name for name, tensor in tensors.items() if id(tensor) not in found]
        _check_names(module, path, absent, [name for name in values if name not in tensors])
    for name, tensor in tensors.items():
        if id(tensor) in found:
            _take(module, name, tensor, found[id(tensor)])


def _take(module: nn.Module, name: str, tensor: Tensor, value: _FileTensor) -> None:
    """Read a tensor, or note for later where its value is."""
    if tuple(tensor.shape) != value.shape:
        raise CheckpointError(
            f"{value.file}: {value.key!r} has the shape {value.shape}, but {name!r} of {type(module).__name__} "
            f"{tuple(tensor.shape)}. Build the model with the configuration that belongs to the files."
        )
    if tensor.is_meta and isinstance(tensor, nn.Parameter):
        setattr(tensor, _ATTRIBUTE, value)
        return
    if tensor.is_meta:
        path, _, attribute = name.rpartition(".")
        tensor = torch.empty_like(tensor, device="cpu")
        setattr(module.get_submodule(path), attribute, tensor)
    value.fill(tensor)


def pretrained_values(module: nn.Module) -> dict[str, Callable[[Tensor], None]]:
    """The functions that read parameters without memory, by name, as `load_pretrained` has noted them."""
    noted = ((name, vars(parameter).get(_ATTRIBUTE)) for name, parameter in module.named_parameters())
    return {name: value.fill for name, value in noted if value is not None}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, modules are built without memory for their parameters.

    Buffers are computed, other than under `torch.device("meta")`: some are in no file, such as rotary frequencies.
    """

    def replaced(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(replaced)
    try:
        yield
    finally:
        handle.remove()


# -- files ------------------------------------------------------------------------------------------------------------


def _values_in(path: Path) -> dict[str, _FileTensor]:
    """The tensors in files, by key."""
    values: dict[str, _FileTensor] = {}
    for file, keys in _files(path).items():
        with _opened(file) as opened:
            present = set(opened.keys())
            for key in present if keys is None else keys:
                if key not in present:
                    raise CheckpointError(f"{file} has no tensor {key!r}, which the index of {path} promises.")
                if key in values:
                    raise CheckpointError(
                        f"{key!r} is in {values[key].file} and in {file}. Give one of the files, or a folder with an "
                        f"index ({_INDEX})."
                    )
                values[key] = _FileTensor(file, key, tuple(opened.get_slice(key).get_shape()))
    return values


def _files(path: Path) -> dict[Path, list[str] | None]:
    """The files to read, each with its keys if there is an index."""
    if path.is_file():
        return {path: None}
    indices, files = sorted(path.glob(_INDEX)), sorted(path.glob("*.safetensors"))
    if len(indices) == 1:
        return _indexed(indices[0])
    if not files:
        raise CheckpointError(
            f"{path} has no safetensors files. Give the folder of a downloaded model (huggingface_hub's "
            "snapshot_download returns it), or one file."
        )
    return dict.fromkeys(files)


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    try:
        places = json.loads(index.read_bytes())["weight_map"].items()
        files: dict[str, list[str]] = {}
        for key, file in places:
            files.setdefault(Path(file).name, []).append(str(key))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}. Download it again.") from error
    return {index.parent / name: keys for name, keys in files.items()}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError("load_pretrained needs the package safetensors: pip install safetensors.") from error
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as a safetensors file: {error}. Download it again.") from error


# -- names ------------------------------------------------------------------------------------------------------------


def _renamed(
    values: Mapping[str, _FileTensor], rename: Callable[[str], str | None] | None, path: object
) -> dict[str, _FileTensor]:
    renamed: dict[str, _FileTensor] = {}
    for key, value in values.items():
        name = key if rename is None else rename(key)
        if name in renamed:
            raise CheckpointError(f"{path}: rename gives {key!r} and {renamed[name].key!r} the same name {name!r}.")
        if name is not None:
            renamed[name] = value
    return renamed


def _check_names(module: nn.Module, path: object, absent: Iterable[str], unexpected: Iterable[str]) -> None:
    kinds = {"are not in the files": list(absent), "are only in the files": list(unexpected)}
    if any(kinds.values()):
        told = "; ".join(f"{len(names)} {kind} ({some(names, _SHOWN)})" for kind, names in kinds.items() if names)
        raise CheckpointError(
            f"The tensors in {path} are not those of {type(module).__name__}: {told}. Give the part of the model that "
            "the files are for, names for their keys (rename), or strict=False to take those that fit."
        )
