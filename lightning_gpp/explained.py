"""Short names of messages: sections of `docs/troubleshooting.md`, which a message names at its end.

A message is of the family whose words it has; otherwise of its class of errors (`GPPError.family`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

FAMILIES: Final = {
    "no-room": "The model does not fit the devices",
    "more-micro-batches": "More micro-batches than samples",
    "more-devices": "devices, the job has",
    "no-stage": "leaves parameters without a stage",
    "no-such-module": "to which no operator of the captured step belongs",
    "other-model": "was made for another model",
    "device-0": "must run on device 0 alone",
    "contradiction": "does not go together with",
    "no-option": "has no option",
    "no-yaml": "is not YAML that can be read",
    "pytorch-lightning": "takes no strategy of lightning.pytorch",
    "no-script": "more processes, each of which runs your script from its beginning",
    "no-batch": "has no tensor with a batch dimension",
    "no-mini-batch": "The mini-batch is None",
    "part-fails": "The training step fails on",
    "other-numbers": "The split model does not compute the same as the unsplit model",
    "no-mean": "So training in micro-batches is not training on one device",
    "mean-logged": "which the training step logs",
    "cached": "Please convert all Tensors to FakeTensors first",
    "value-read": "reads the value of a tensor inside a module",
    "step-decides": "the step reads a value that the network computed",
    "random": "draws random numbers by other means than torch",
    "no-parameter": "but is no parameter of the module",
    "step-changes": "which a module reads, and would do so once per micro-batch",
    "early-parameter": "the step uses a parameter before its first module call",
    "other-step": "when the step was captured",
    "none-returned": "returned None instead of a loss",
    "no-gradient": "returned a loss without a gradient",
    "counter": "It runs once per micro-batch",
    "no-batch-here": "on a rank that has none",
    "gradient-hook": "have hooks on their gradients",
    "late-layer": "got parameters that no stage has",
    "l-bfgs": "returned L-BFGS",
    "not-finite": "is not finite after mini-batch",
    "world-size": "is the number of processes",
    "sampler": "the samples among",
    "hang": "Hang report",
    "alone": "Let every rank make it",
    "ranks-differ": "The ranks disagree on",
    "no-rank-0": "cannot reach rank 0",
    "other-checkpoint": "The checkpoint does not fit",
    "no-shared-folder": "a file system that all ranks share",
    "peer": "First cause",
}
"""Words of a message by the short name of its family; the first that a message has counts."""

_END: Final = " (gpp-doctor explain {})"
_ENDS: Final = re.compile(re.escape(_END).replace(r"\{\}", "([a-z0-9-]+)"))


def named_at_end(text: str, family: str = "") -> str:
    """The message with the short name of its family at its end, and nowhere else.

    A message that quotes another one is of its family.

    Args:
        text: the message.
        family: the short name for a message whose words are of none; empty leaves it without.
    """
    quoted = _ENDS.search(text)
    plain = without_name(text)
    by_words = (name for name, words in FAMILIES.items() if words in plain)
    name = quoted[1] if quoted else next(by_words, family)
    return plain + _END.format(name) if name else plain


def without_name(text: str) -> str:
    """The message without short names."""
    return _ENDS.sub("", text)


def sections() -> dict[str, str]:
    """The sections of `docs/troubleshooting.md` by their short names."""
    package = Path(__file__).parent
    installed = package / "troubleshooting.md"
    page = installed if installed.is_file() else package.parent / "docs" / installed.name
    _, *parts = re.split(r"(?m)^### ", page.read_text(encoding="utf-8"))
    split = (re.split(r"(?m)^## ", part)[0].partition("\n") for part in parts)
    return {name.strip(): text.strip() for name, _, text in split}
