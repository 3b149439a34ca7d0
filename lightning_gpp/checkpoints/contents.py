"""A description of a checkpoint: what a run that resumes from it would find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_gpp.checkpoints.atomic import present
from lightning_gpp.checkpoints.convert import opened
from lightning_gpp.checkpoints.layout import KEY
from lightning_gpp.checkpoints.stored import StoredValues


def contents(path: str | Path) -> dict[str, str]:
    """The contents of a checkpoint, in words.

    Raises:
        CheckpointError: there is no whole checkpoint.
    """
    checkpoint, path = opened(path), present(Path(path))
    entry = checkpoint.get(KEY, {})
    pipeline = entry.get("pipeline") or {}
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    kind = f"folder of {len(files)} files" if path.is_dir() else "file"
    version = checkpoint.get("pytorch-lightning_version", "of unknown version")
    described = {
        "checkpoint": f"{path}, {kind}, {_size(sum(file.stat().st_size for file in files))}",
        "written by": f"Lightning {version}" + (f", torch {entry['torch']}" if "torch" in entry else ""),
        "progress": f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}",
        "parameters and buffers": _tensors(checkpoint.get("state_dict", {})),
        **{
            f"optimizer {number}": _tensors(state["state"])
            for number, state in enumerate(checkpoint.get("optimizer_states", []))
        },
        "weights of work in flight": _tensors(pipeline.get("values", {})) if pipeline else "",
        "weight policy": pipeline.get("policy", "synchronous") if entry else "",
        "other entries": ", ".join(sorted(checkpoint.keys() - {"state_dict", "optimizer_states", KEY})),
        "plan": "\n" + entry["plan"] if entry.get("plan") else "",
    }
    return {name: text for name, text in described.items() if text}


def _tensors(tree: Any) -> str:
    outlines = list(_outlines(tree))
    types = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in outlines}))
    return f"{len(outlines)} tensors, {_size(sum(tensor.nbytes for tensor in outlines))} ({types or 'none'})"


def _outlines(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, StoredValues):
        yield from (outline for name in tree if (outline := tree.outline(name)) is not None)
    elif isinstance(tree, Mapping):
        for branch in tree.values():
            yield from _outlines(branch)
    elif isinstance(tree, Tensor):
        yield tree


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
