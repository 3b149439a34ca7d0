"""The form of errors of a capture: the line, the reason, and the ways out."""

from __future__ import annotations

from collections.abc import Sequence

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
