"""The order of 1F1B and its descendants: a warm-up of forwards, then backwards and forwards in turn."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.schedules.actions import Action


def alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int, weights: Sequence[Action] = (), late: int = 0
) -> tuple[Action, ...]:
    """`warm_up` forwards, then a backward and a forward in turn, then the remaining backwards.

    Args:
        forwards: as many as backwards; all sequences in the order in which they run.
        backwards: full backwards, or input gradients.
        warm_up: forwards before the first backward.
        weights: weight gradients; none if backwards are full.
        late: number of later input gradients that come before the weight gradients of a micro-batch.
    """
    actions = list(forwards[:warm_up])
    for index, backward in enumerate(backwards):
        actions.append(backward)
        if index >= late:
            actions += weights[index - late : index - late + 1]
        actions += forwards[warm_up + index : warm_up + index + 1]
    return (*actions, *weights[max(0, len(backwards) - late) :])
