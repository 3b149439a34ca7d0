"""The form of errors of a capture: the line, the reason, and the ways out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_gpp.capture.recording import Recording
from lightning_gpp.errors import CaptureError, NoNetworkError
from lightning_gpp.wording import named


def no_network() -> CaptureError:
    """The error of a step without a network call."""
    return refusal(
        "its first line",
        "it calls no submodule that has parameters",
        "call modules, not functions",
        kind=NoNetworkError,
    )


def refusal(
    line: str,
    reason: str,
    remedy: str,
    modules: Sequence[str] = (),
    kind: type[CaptureError] = CaptureError,
) -> CaptureError:
    """A CaptureError in the common form: line, reason, way out. `modules`: see there."""
    error = kind(f"Cannot capture the step at {line}: {reason}.\nWay out: {remedy}.")
    error.modules, error.reason = modules, f"{line}: {reason}"
    return error


def filled(line: str, path: str) -> CaptureError:
    """The error of a module call that writes into a container among its arguments."""
    return refusal(
        line,
        f"{named(path)} writes into a dictionary, list or object that it gets, which is on another device",
        "copy it at the beginning of the forward (batch = dict(batch)), and return what others read",
    )


def escaped(line: str, modules: Sequence[str] = ()) -> CaptureError:
    """The error of a tensor from inside of a module. `modules`: those around the line; none if it is in the step."""
    return refusal(
        line,
        f"the {'forward' if modules else 'step'} reads a tensor that a module computed but did not return (a hook or "
        "an attribute kept it)",
        "return it from the module's forward",
        modules,
    )


def read_items(line: str, who: str, modules: Sequence[str] = ()) -> CaptureError:
    """The error of a forward or function that reads texts or numbers of the batch. `modules`: those around the line."""
    return refusal(
        line,
        f"{who} reads texts or numbers of the batch that are no tensors, and runs on other devices",
        "make tensors of them in the data, or in the step, and pass these",
        modules,
    )


def not_a_parameter(line: str) -> CaptureError:
    """The error of a trained tensor that the module does not know."""
    return refusal(
        line,
        "the step computes with a tensor that needs a gradient, but is no parameter of the module (is it in a module "
        "that is kept in a plain list or dict?)",
        "keep modules in nn.ModuleList or nn.ModuleDict, and parameters in nn.Parameter attributes",
    )


def refuse_late_network(recording: Recording, path: str) -> None:
    """Refuse a call of a module after the step has read what the network computed, or set a hook on its gradient."""
    for _, line in recording.value_reads:
        raise refusal(
            line,
            f"the step reads a value that the network computed, and calls {named(path)} after it",
            "move this decision into a module's forward",
        )
    for name, line in recording.gradient_hooks:
        raise refusal(
            line,
            f"the step calls `{name}` on a tensor, and {named(path)} after it, whose gradient is on other ranks",
            "do it in a module's forward, or let the step run as a whole (strategy.step=whole)",
        )


_TRANSFORMS: Final = ("BatchedTensor", "torch.func", "functorch", "vmap")
"""Parts of the messages of torch's function transforms, whose tensors have no storage."""


def remedy_for(error: Exception, in_step: bool) -> str:
    """The way out of an error of a recording."""
    if isinstance(error, AttributeError):
        return (
            "the step is captured at set-up, before hooks such as on_train_start: create the attribute in __init__ or "
            "setup()"
        )
    if any(name in str(error) for name in _TRANSFORMS):
        return (
            "put the transform (torch.vmap, torch.func.grad) and the modules that it calls into the forward of a "
            "module of their own, which is then never cut"
        )
    if type(error).__module__ == "builtins":  # and not torch's, for what it cannot do without values
        return "correct this line, if the step fails on one device as well; otherwise write it in another way"
    if in_step:
        return (
            "move this line behind the step's last call of a module, where it runs as plain Python; or put it and the "
            "modules that read its result into the forward of a module of their own, which is then never cut"
        )
    return (
        "put this line and the modules that read its result into the forward of a module of their own, which is then "
        "never cut"
    )
