"""The order that 1F1B and what is made after it share: a warm-up of forwards, then a backward and a forward in turn."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.schedules.actions import Action


def alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int, weights: Sequence[Action] = (), late: int = 0
) -> tuple[Action, ...]:
    """Forwards, after `warm_up` of them each behind a backward.

    Args:
        forwards: as many as backwards, in the order in which they run, as all of these.
        backwards: whole, or gradients of inputs.
        warm_up: forwards before the first backward.
        weights: gradients of parameters, where they are apart.
        late: gradients of inputs between those of the same micro-batch and these.
    """
    actions = list(forwards[:warm_up])
    for index, backward in enumerate(backwards):
        actions.append(backward)
        if index >= late:
            actions += weights[index - late : index - late + 1]
        actions += forwards[warm_up + index : warm_up + index + 1]
    return (*actions, *weights[max(0, len(backwards) - late) :])
