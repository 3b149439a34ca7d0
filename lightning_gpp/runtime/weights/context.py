"""The context of a policy: facts about its device, from the program, and the bracket around an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_gpp._compat.torch import kept_version_counters
from lightning_gpp.runtime.weights.interface import WeightPolicy, Weights
from lightning_gpp.schedules.actions import Action
from lightning_gpp.schedules.continuous import delays_of, forwards_ahead
from lightning_gpp.schedules.program import Program


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
        lead=program.lead,
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


@contextmanager
def update(policy: WeightPolicy, parameters: Sequence[Parameter]) -> Iterator[None]:
    """Inside, an optimizer may step although micro-batches are in flight: autograd and the policy accept it."""
    policy.before_update()
    with kept_version_counters(parameters):
        yield
    policy.after_update()
