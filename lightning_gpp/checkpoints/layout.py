"""The same checkpoint as an ordinary one and as a folder: which entry is where.

    ordinary                                  folder
    state_dict                     NAME       model.NAME
    optimizer_states  i  state     number     optimizer_i.state.NAME
                         param_groups         optimizer_i.param_groups, with names for numbers
    gpp pipeline values  KIND      NAME       pipeline.KIND.NAME
    everything else                           meta.pt

An optimizer whose parameters have no names, because plain Lightning has written it, keeps its numbers.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_gpp.checkpoints.stored import Folder, StoredValues
from lightning_gpp.errors import CheckpointError

KEY: Final = "gpp"
"""Entry of a checkpoint: seed and step counter of the random streams, the plan's text, and names."""


def entry_of(checkpoint: Any, path: object) -> dict[str, Any]:
    """This library's entry of a checkpoint; empty in one of plain Lightning.

    Args:
        checkpoint: the content of a file.
        path: the place of the checkpoint, for messages.

    Raises:
        CheckpointError: the file is damaged, or is no checkpoint.
    """
    entry = checkpoint.get(KEY, {}) if isinstance(checkpoint, Mapping) else None
    if not isinstance(entry, Mapping):
        what = f"its entry {KEY!r} is a {type(entry).__name__}" if entry is not None else "it is no mapping"
        raise CheckpointError(f"{path} cannot be resumed: {what}. Give a checkpoint of a trainer (ckpt_path).")
    return dict(entry)


def split(checkpoint: Mapping[str, Any], first: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of this rank, as a tree, and everything else of a checkpoint.

    Args:
        checkpoint: an ordinary checkpoint; tensors of other ranks have no memory.
        first: whether this rank saves what all ranks have.
    """
    rest = dict(checkpoint)
    state = rest.pop("state_dict", {})
    tensors: dict[str, Any] = {"model": {name: value for name, value in state.items() if _is_here(value, first)}}
    entry = dict(rest.get(KEY, {}))
    rest[KEY] = {**entry, "names": list(state)}
    if "optimizer_states" in rest:
        states = rest.pop("optimizer_states")
        named = entry.get("parameters", [None] * len(states))
        tensors |= {f"optimizer_{i}": _named(state, named[i], first) for i, state in enumerate(states)}
    if entry.get("pipeline"):
        pipeline = dict(entry["pipeline"])
        tensors["pipeline"] = pipeline.pop("values", {})
        rest[KEY]["pipeline"] = pipeline
    return tensors, rest


def _is_here(value: Any, first: bool) -> bool:
    return not value.is_meta if isinstance(value, Tensor) else first


def _named(state: Mapping[str, Any], names: Sequence[str] | None, first: bool) -> dict[str, Any]:
    """An optimizer's state by the parameters' names."""
    groups = [{**group, "params": [_name(n, names) for n in group["params"]]} for group in state["param_groups"]]
    values = {str(_name(number, names)): value for number, value in state["state"].items()}
    return {"state": values, **({"param_groups": groups} if first else {})}


def _name(number: int, names: Sequence[str] | None) -> str | int:
    return number if names is None else names[number]


def dumped(rest: Mapping[str, Any]) -> bytes:
    """The content of `meta.pt`."""
    buffer = io.BytesIO()
    torch.save(dict(rest), buffer)
    return buffer.getvalue()


def joined(folder: Folder, rest: Mapping[str, Any]) -> dict[str, Any]:
    """The ordinary checkpoint in a folder with this `meta.pt`; its tensors are read when they are asked for."""
    checkpoint, tree, entry = dict(rest), folder.tree, dict(rest.get(KEY, {}))
    model = tree.get("model", {})
    checkpoint["state_dict"] = StoredValues(folder, {n: model[n] for n in entry.pop("names", model) if n in model})
    optimizers = [tree[name] for i in range(len(tree)) if (name := f"optimizer_{i}") in tree]
    if optimizers:
        checkpoint["optimizer_states"] = [_optimizer(folder, optimizer) for optimizer in optimizers]
    if entry.get("pipeline"):
        kinds = tree.get("pipeline", {})
        entry["pipeline"] |= {"values": {kind: StoredValues(folder, keys) for kind, keys in kinds.items()}}
    checkpoint[KEY] = entry
    return checkpoint


def _optimizer(folder: Folder, tree: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by the parameters' numbers."""
    groups = folder.value(tree["param_groups"])
    states, numbered, start = tree.get("state", {}), {}, 0
    for group in groups:
        numbers = range(start, start + len(group["params"]))
        for number, name in zip(numbers, group["params"], strict=True):
            if str(name) in states:
                numbered[number] = StoredValues(folder, states[str(name)])
        group["params"], start = list(numbers), start + len(numbers)
    return {"state": numbered, "param_groups": groups}
