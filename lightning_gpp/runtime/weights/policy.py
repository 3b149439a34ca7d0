"""Weight policies: choose the values of its parameters with which a stage computes, if the pipeline does not flush.

*Version* v of the weights are their values after v optimizer steps. A policy chooses the version, or other values, for
each forward and backward, and keeps the copies that this takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_gpp._compat.torch import kept_version_counters
from lightning_gpp.errors import ConfigError
from lightning_gpp.registry import Registry
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.continuous import delays_of, forwards_ahead
from lightning_gpp.schedules.program import Program

if TYPE_CHECKING:
    from lightning_gpp.runtime.operations import Operation, State


class Use(NamedTuple):
    """A computation of a stage with its weights, for one micro-batch.

    `final`: it is the last one for this micro-batch.
    """

    stage: int
    mini_batch: int
    micro_batch: int
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one device.

    Args:
        parameters: trained parameters of each of its stages.
        micro_batches: micro-batches of each of its stages per mini-batch, on this device.
        entry: mini-batches by which the stage is ahead that first read a micro-batch, by stage and micro-batch.
        delays: mini-batches between a forward and its backward in the steady state, by stage of the plan; none where
            the pipeline always flushes.
        accumulated: mini-batches per update.
        elsewhere: stages on other devices that use a parameter, too.
        optimizers: returns the device's optimizers.
    """

    parameters: Mapping[int, Sequence[Parameter]]
    micro_batches: Mapping[int, Sequence[int]] = field(default_factory=dict)
    entry: Mapping[tuple[int, int], int] = field(default_factory=dict)
    delays: Mapping[int, int] = field(default_factory=dict)
    accumulated: int = 1
    elsewhere: Mapping[Parameter, Sequence[int]] = field(default_factory=dict)
    optimizers: Callable[[], Sequence[Optimizer]] = lambda: ()

    def late(self, stage: int) -> int:
        """Updates between a forward of the stage and its backward, in the steady state."""
        return -(-self.delays.get(stage, 0) // self.accumulated)

    @property
    def most_late(self) -> int:
        """The most updates between a forward and its backward, on any stage."""
        return max(map(self.late, self.delays), default=0)


class WeightPolicy:
    """Base class of policies, each of one device: counts updates, and measures delays.

    It is called around every computation with weights, and around updates.

    Attributes:
        rewrites: whether a backward may compute with other values than its forward, where updates lie between them.
        newest_graphs: whether a backward goes through the graph of its stage's newest forward, whatever the mini-batch.
        updates: optimizer steps so far, which is the newest version.
    """

    rewrites: ClassVar[bool] = True
    newest_graphs: ClassVar[bool] = False

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.updates = 0
        self.first = 0
        self._before: Callable[[int], int] = int

    @classmethod
    def copies(cls, delay: int) -> int:
        """Number of copies of a stage's weights that are kept besides the newest, given its delay in updates.

        Raises:
            ScheduleError: the policy does not allow such a delay. Planner and training ask here.
        """
        return 0

    def begin(self, before: Callable[[int], int], first: int) -> None:
        """Start with an empty pipeline at mini-batch `first`. `before(n)`: number of updates before mini-batch n's."""
        self._before, self.first = before, first
        self.updates = before(first)

    def empty(self) -> None:
        """Forget the micro-batches in the pipeline, which are dropped."""

    def delay(self, use: Use) -> int:
        """Number of updates between now and the backward of the micro-batch."""
        return self._before(use.mini_batch) - self.updates

    def delay_elsewhere(self, parameter: Parameter, mini_batch: int) -> int:
        """The most updates between a forward of the mini-batch and its backward, in stages on other devices."""
        stages = self.weights.elsewhere.get(parameter, ())
        ahead = max((self.weights.delays.get(stage, 0) for stage in stages), default=0)
        return self._before(mini_batch) - self._before(max(mini_batch - ahead, self.first))

    def enter_forward(self, use: Use) -> None:
        """Give the stage's parameters the values for a forward."""

    def leave_forward(self, use: Use) -> None:
        """Restore their newest values."""

    def enter_backward(self, use: Use) -> None:
        """Give the stage's parameters the values for a backward, or for the recomputation before it."""

    def leave_backward(self, use: Use) -> None:
        """Restore their newest values."""

    def before_update(self) -> None:
        """Prepare for an optimizer step, which changes the newest values in place."""

    def after_update(self) -> None:
        """Take note of the optimizer step's end."""
        self.updates += 1

    def saved(self) -> dict[str, dict[Parameter, Tensor]]:
        """The tensors by name that a run needs to go on with an empty pipeline."""
        return {}

    def restore(self, saved: Mapping[str, Mapping[Parameter, Tensor]]) -> None:
        """Load the result of `saved`; `updates` are those of that time, and mini-batches have the same numbers."""


Policy = TypeVar("Policy", bound=type[WeightPolicy])

WEIGHT_POLICIES: Final[Registry[type[WeightPolicy]]] = Registry(
    setting="strategy.weights",
    kind="weight policy",
    decorator="runtime.weights.register_weights",
    error=ConfigError,
    built_in=("synchronous",),
)


def register_weights(name: str) -> Callable[[Policy], Policy]:
    """Make a policy available as `strategy.weights=name`; its keyword-only arguments are its options.

    Raises:
        ConfigError: the name is taken.
    """

    def entry(policy: Policy) -> type[WeightPolicy]:
        return policy

    return WEIGHT_POLICIES.adding(name, entry)


def make_policy(name: str, weights: Weights, **options: Any) -> WeightPolicy:
    """The policy registered under a name, for the weights of one device.

    Raises:
        ConfigError: there is none, or it has no such option.
    """
    check_options(name, options)
    return WEIGHT_POLICIES.get(name)(weights, **options)


def copies_of(name: str, delay: int) -> int:
    """Copies of a stage's weights that a policy keeps besides the newest, if the stage has this delay.

    Raises:
        ScheduleError: the policy does not allow it.
    """
    return WEIGHT_POLICIES.get(name).copies(delay)


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise ConfigError if there is no policy of this name, or it has no such options, or of other types."""
    known = options_of(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"strategy.weight_options has {unknown}; strategy.weights={name} knows {sorted(known) or 'no options'}."
        )
    hints = get_type_hints(WEIGHT_POLICIES.get(name).__init__)
    for option, value in options.items():
        try:
            TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ConfigError(
                f"strategy.weight_options.{option}={value!r}: {problem}. The default is {known[option]!r}."
            ) from None


def options_of(name: str) -> dict[str, Any]:
    """The options of a policy, and their defaults."""
    parameters = inspect.signature(WEIGHT_POLICIES.get(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def weights_of(
    program: Program,
    device: int,
    parameters: Mapping[int, Sequence[Parameter]],
    optimizers: Callable[[], Sequence[Optimizer]],
    elsewhere: Mapping[Parameter, Sequence[int]] | None = None,
) -> Weights:
    """The weights of a device, with their use in its program.

    Args:
        program: a continuous program, or one that flushes, in which nothing is ahead.
        device: the device.
        parameters: parameters of each of its stages; those that are not trained are left out.
        optimizers: returns the device's optimizers, once they are known.
        elsewhere: stages on other devices that use one of these parameters, too.
    """
    ahead = forwards_ahead(program)
    plan = program.plan
    return Weights(
        parameters={stage: [p for p in listed if p.requires_grad] for stage, listed in parameters.items()},
        micro_batches={stage: plan.micro_batches(stage, device, program.batch_size) for stage in parameters},
        entry=_entry(program, ahead),
        delays=delays_of(program),
        elsewhere=elsewhere or {},
        optimizers=optimizers,
    )


def _entry(program: Program, ahead: Mapping[Action, int]) -> dict[tuple[int, int], int]:
    """The largest of these numbers among all forwards of the same samples, for every micro-batch of a stage."""
    plan = program.plan
    spans = [(plan.intervals(a.stage, program.batch_size)[a.micro_batch], number) for a, number in ahead.items()]
    return {
        (stage, number): max(most for (begin, end), most in spans if begin < stop and start < end)
        for stage in range(len(plan.stages))
        for number, (start, stop) in enumerate(plan.intervals(stage, program.batch_size))
    }


def with_weights(weights: WeightPolicy, action: Action, state: State, operation: Operation) -> Operation:
    """An operation on the parameter values that the policy chooses."""
    stage, number, final = action.stage, action.micro_batch, action.kind in (Kind.BACKWARD, Kind.INPUT)
    enter, leave = (
        (weights.enter_forward, weights.leave_forward)
        if action.kind is Kind.FORWARD
        else (weights.enter_backward, weights.leave_backward)
    )

    def run() -> None:
        use = Use(stage, state.step, number, final)
        enter(use)
        operation()
        leave(use)

    return run


@contextmanager
def update(policy: WeightPolicy, parameters: Sequence[Parameter]) -> Iterator[None]:
    """Inside, an optimizer may step although micro-batches are in flight: autograd and the policy accept it."""
    policy.before_update()
    with kept_version_counters(parameters):
        yield
    policy.after_update()
