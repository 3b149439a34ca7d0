"""Values from safetensors files: which names go where, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp import CheckpointError, load_pretrained, parameters_on_meta
from lightning_gpp.checkpoints.pretrained import pretrained_values

save_file = pytest.importorskip("safetensors.torch").save_file


class Tied(nn.Module):
    """A model whose files have one of two names of a tensor, and lack a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items() if name != "last.weight"}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A folder of two files with an index, beside a file that the index does not name."""
    torch.manual_seed(1)
    values = {name: torch.randn(v.shape) if v.dim() else v for name, v in values_of(Tied()).items()}
    names = sorted(values)
    files = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, keys in files.items():
        save_file({key: values[key] for key in keys}, tmp_path / file)
    save_file(values, tmp_path / "everything.safetensors")
    places = {key: file for file, keys in files.items() for key in keys}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path, values


def test_what_has_memory_is_read_at_once(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, values = saved
    for path in (folder, folder / "everything.safetensors"):
        module = Tied()
        load_pretrained(module, path)
        assert all(torch.equal(value, values[name]) for name, value in values_of(module).items())
        assert module.last.weight is module.first.weight
        assert not pretrained_values(module)


def test_parameters_without_memory_are_read_later_one_by_one(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, values = saved
    with parameters_on_meta():
        module = Tied()
    assert module.first.weight.is_meta
    assert module.first.weight is module.last.weight
    assert module.frequencies.tolist() == [0, 1, 2, 3]
    load_pretrained(module, folder)
    assert torch.equal(module.norm.running_mean, values["norm.running_mean"])
    later = pretrained_values(nn.ModuleDict({"net": module}))
    assert sorted(later) == ["net.first.bias", "net.first.weight", "net.norm.bias", "net.norm.weight"]
    read = torch.empty(4, 4, dtype=torch.float64)
    later["net.first.weight"](read)
    assert torch.equal(read, values["first.weight"].double())


def test_buffers_on_meta_get_memory(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, values = saved
    with torch.device("meta"):
        module = Tied()
    load_pretrained(module, folder)
    assert torch.equal(module.norm.running_var, values["norm.running_var"])
    assert module.first.weight.is_meta


def test_keys_are_renamed(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, values = saved
    whole = nn.ModuleDict({"net": Tied()})
    load_pretrained(whole, folder, rename="net.{}".format)
    assert torch.equal(whole["net"].first.weight, values["first.weight"])
    part = nn.Linear(4, 4)
    load_pretrained(part, folder, rename=lambda key: key[6:] if key.startswith("first.") else None)
    assert torch.equal(part.weight, values["first.weight"])


def test_what_does_not_fit_is_named(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, values = saved
    with pytest.raises(
        CheckpointError, match=r"8 are not in the files \(net\.first\.weight, .*; 7 are only in the fil"
    ):
        load_pretrained(nn.ModuleDict({"net": Tied()}), folder)
    module = nn.ModuleDict({"first": nn.Linear(4, 4), "new": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match=r"2 are not in the files \(new\.weight, new\.bias\); 5 are only"):
        load_pretrained(module, folder)
    load_pretrained(module, folder, strict=False)
    assert torch.equal(module["first"].weight, values["first.weight"])
    with pytest.raises(CheckpointError, match=r"has the shape \(4, 4\), but 'first.weight' of .* \(9, 4\)"):
        load_pretrained(nn.ModuleDict({"first": nn.Linear(4, 9)}), folder, strict=False)
    with pytest.raises(CheckpointError, match="rename gives .* the same name 'x'"):
        load_pretrained(module, folder, rename=lambda key: "x")


def truncate(folder: Path) -> None:
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    r"model-1.safetensors cannot be read": truncate,
    r"is not an index of": lambda folder: (folder / "model.safetensors.index.json").write_bytes(b"[" * 100_000),
    r"is in .*everything.* and in .*model-1": lambda folder: (folder / "model.safetensors.index.json").unlink(),
    r"has no tensor 'first.bias', which the index": lambda folder: save_file({}, folder / "model-1.safetensors"),
    r"has no safetensors files": empty,
}


@pytest.mark.parametrize("told", DAMAGES)
def test_damaged_folders_are_refused(saved: tuple[Path, dict[str, Tensor]], told: str) -> None:
    folder, _ = saved
    DAMAGES[told](folder)
    with pytest.raises(CheckpointError, match=told):
        load_pretrained(Tied(), folder)
