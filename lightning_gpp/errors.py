"""Errors that a user can cause: subclasses of one class, so that a caller can catch them together."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import ClassVar, Final

from lightning_gpp.explained import named_at_end
from lightning_gpp.wording import spoken

_ELSEWHERE: Final = "_gpp_shown_elsewhere"


class GPPError(Exception):
    """Base class of all errors of this library. The message says what is wrong, where, which values, and what to do.

    It ends with the short name of its section in `docs/troubleshooting.md`.
    """

    family: ClassVar = "runtime"
    """The short name of messages whose words are of no family."""

    def __str__(self) -> str:
        text = super().__str__()
        return named_at_end(spoken(text), self.family) if text else text


def is_shown_elsewhere(error: BaseException | None) -> bool:
    """True if this error, or the one that it follows from, is shown by rank 0, or as the cause of the job's end."""
    return error is not None and (getattr(error, _ELSEWHERE, False) or is_shown_elsewhere(error.__cause__))


def show_elsewhere(error: BaseException) -> None:
    """Say of an error of this rank that it is shown: by rank 0, which has it, too, or as the cause of the job's end."""
    setattr(error, _ELSEWHERE, True)


class ConfigError(GPPError):
    """A setting of the strategy, the trainer or the command line cannot work."""

    family = "setting"


class MicroBatchesError(ConfigError):
    """The mini-batch cannot be cut into the micro-batches of the settings."""

    family = "micro-batches"


class CaptureError(GPPError):
    """The user's step or module cannot be captured. Names the user's line, the reason and the ways out.

    Attributes:
        modules: paths of the called modules in which it happened, the innermost first.
        reason: the reason alone.
        refuted: number of the truth value, read by the step, without which it would not have happened.
    """

    family = "capture"

    modules: Sequence[str] = ()
    reason: str = ""
    refuted: int | None = None


class NoNetworkError(CaptureError):
    """The user's step calls no module that has parameters."""

    family = "no-network"


class PlanError(GPPError):
    """A plan is malformed, does not fit the model, or does not fit the devices."""

    family = "plan"


class ScheduleError(GPPError):
    """A schedule is unknown, malformed, or does not fit its plan."""

    family = "schedule"


class VerificationError(ScheduleError):
    """A program was refused by the verifier: it would hang, or compute with missing data."""

    family = "refused-program"


class CheckpointError(GPPError):
    """A checkpoint does not fit the model."""

    family = "checkpoint"


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint of this name."""


class ShapeError(GPPError):
    """A batch cannot be cut into micro-batches, or a tensor between stages does not have the expected shape."""

    family = "shape"


class SelfCheckError(GPPError):
    """The split model does not compute what the unsplit model computes."""

    family = "other-numbers"


class IndivisibleError(SelfCheckError):
    """The training step fails on a part of its mini-batch, in one process, too; `undivided`: on all of it as well."""

    undivided = False

    family = "part-fails"


class StepError(GPPError):
    """The user's step returns no loss that can be trained."""

    family = "loss"


class ForeignTensorError(GPPError):
    """User code needs the values of a parameter or buffer that other ranks hold."""

    family = "foreign"


class PeerFailure(GPPError):
    """Another rank failed, was killed or stopped answering; carries that rank's cause."""

    family = "peer"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error. `BaseException.add_note` exists from Python 3.11 on."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """The known names that a wrong one may stand for: the closest first, or those with its letters as initials."""
    known = list(known)
    initials = [each for each in known if "".join(part[:1] for part in each.split("_")) == name]
    return (
        get_close_matches(name, known, n=3, cutoff=0.8) or get_close_matches(name, known, n=3, cutoff=0.5) or initials
    )


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a message: names that are close to a wrong one, and all existing ones."""
    known = list(known)
    close = close_to(str(name), known)
    guess = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{guess} There are: {', '.join(sorted(known))}." if known else ""
