"""Lets torchvision be imported where its compiled operators do not fit the installed torch (a CPU build, say).

The models of the zoo do not call them, but torchvision describes two of them to torch when it is imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def declare() -> None:
    """Declare the operators that torchvision describes, unless its library can be loaded."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms") or _loads(Path(spec.origin)):
        return
    for name, schema in SCHEMAS.items():
        torch.library.define(f"torchvision::{name}", schema)


def _loads(package: Path) -> bool:
    try:
        for library in package.parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        return False
    return True
