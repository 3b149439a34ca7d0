"""Errors of a capture: the line, the reason, the ways out; and what a capture does about some of them itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from lightning_gpp.capture.recording import Event, Recording
from lightning_gpp.errors import CaptureError, NoNetworkError
from lightning_gpp.wording import named

T = TypeVar("T")


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
    for note in recording.noted(Event.READS_VALUE):
        raise refusal(
            note.line,
            f"the step reads a value that the network computed, and calls {named(path)} after it",
            "move this decision into a module's forward",
        )
    for note in recording.noted(Event.HOOKS_GRADIENT):
        raise refusal(
            note.line,
            f"the step calls `{note.subject}` on a tensor, and {named(path)} after it, whose gradient is on other "
            "ranks",
            "do it in a module's forward",
        )


def remedy_for(error: Exception) -> str:
    """The way out of an error of a recording."""
    if isinstance(error, AttributeError):
        return (
            "the step is captured at set-up, before hooks such as on_train_start: create the attribute in __init__ or "
            "setup()"
        )
    if type(error).__module__ == "builtins":  # and not torch's, for what it cannot do without values
        return "correct this line, if the step fails on one device as well; otherwise write it in another way"
    return (
        "put this line, the modules that it calls and those that read its result into the forward of a module of their "
        "own, which is then never cut; in the step, a line behind the last call of a module may do what it likes"
    )


# --- changes with which a refused recording goes on


def attempted(
    module: nn.Module, attempt: Callable[[Changes], T], opens: bool = True, uncut: Mapping[str, str] = {}
) -> T:
    """The result of `attempt(changes)`, with changes for what cannot be recorded. `opens`, `uncut`: see `Changes`."""
    changes = Changes(opens, dict(uncut))
    while True:
        try:
            return attempt(changes)
        except CaptureError as error:
            if not changes.answer(error, module):
                raise (changes.opened_for[0] if changes.opened_for else error) from error.__cause__


@dataclass(slots=True)
class Changes:
    """Parts that are recorded in another way, because they were refused.

    Args:
        opens: whether forwards may run as parts of the step.
        uncut: reasons why modules are called whole and never cut, by path.
        opened: reasons why the forwards of modules run as parts of the step, by path.
        refuted: numbers of truth values, read by the step, that are false; it cannot go on with others.
    """

    opens: bool = True
    uncut: dict[str, str] = field(default_factory=dict)
    opened: dict[str, str] = field(default_factory=dict)
    refuted: set[int] = field(default_factory=set)
    opened_for: list[CaptureError] = field(default_factory=list)
    """The refusals that modules were opened for; the user's reason if that does not help."""
    compared: bool = False
    """True if recordings were compared before."""

    def answer(self, error: CaptureError, module: nn.Module) -> bool:
        """Note what to do about a refusal; false if nothing can be done."""
        path = next((path for path in error.modules if path not in self.uncut), None)
        if error.refuted is not None:
            self.refuted.add(error.refuted)
        elif path is None and self._opens_criterion(error, module):
            self.opened[error.modules[-1]] = self.uncut.pop(error.modules[-1])
        elif path is None or (_holds_all(module, path) and not self.opens):
            return False
        elif _holds_all(module, path):
            self.refuted.clear()
            self.opened_for.append(error)
            self.opened.update(dict.fromkeys(error.modules[error.modules.index(path) :], error.reason))
        else:
            for inner in [inner for inner in self.uncut if inner.startswith(f"{path}.")]:
                del self.uncut[inner]
            self.uncut[path] = error.reason
        return True

    def _opens_criterion(self, error: CaptureError, module: nn.Module) -> bool:
        """True if the step calls a module with buffers alone, such as a loss with weights of classes, in vain."""
        if not (error.modules and self.opens) or error.modules[-1] not in self.uncut:
            return False
        return next(module.get_submodule(error.modules[-1]).parameters(), None) is None


def _holds_all(module: nn.Module, path: str) -> bool:
    """True if a submodule has all parameters: what is in one piece needs no pipeline."""
    return len({*module.parameters()} - {*module.get_submodule(path).parameters()}) == 0
