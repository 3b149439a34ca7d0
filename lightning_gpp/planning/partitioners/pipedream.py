"""PipeDream's partitioner: the units as one chain, cut and replicated by dynamic programming.

Source: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.1. Let
A[D, k] be the slowest stage's seconds if k devices run the last units D of the chain,

    A[D, k] = min over ends D' of D, m of max( A[D', k - m], T(D - D', m), transfer(D) / m )

T is one stage with m replicas: its compute, plus the reduction of its gradients. `transfer` is that of all values that
cross the cut in front of D, and of their gradients. This is Piper's recurrence (`downset_search`) for the downsets of
one order. Seconds are per sample here, and

* branches are put one after another, in the order of the units, and the stages run as that chain, as in GraphPipe's
  comparison;
* the paper solves level by level, where a device of a level is a group of the level below. Here all devices are one
  level: m replicas are joined by the innermost link that joins so many neighbours, and a stage and the one in front of
  it by that of twice as many;
* the pipeline is synchronous, so gradients are reduced once per mini-batch, not once per micro-batch. The reduction is
  a ring (2(m - 1)/m of the bytes), as in the simulation; the release counts the 4(m - 1)/m of a parameter server;
* the replicas of a stage share each micro-batch, so T takes the seconds of a share;
* memory: weights, gradients and optimizer state, and the activations of ceil(devices from here on / m) micro-batches;
* stages recompute only if the problem demands it: PipeDream does not choose that;
* every device is used, and of all micro-batch sizes of the problem the one with the shortest simulated step is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.chains import gradient_seconds
from lightning_gpp.planning.partitioners.downset_search import Crossing, Fitting
from lightning_gpp.planning.partitioners.graphpipe.tables import weakest_link
from lightning_gpp.planning.partitioners.piper import ChainCosts, solved
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Array, Problem


@register_partitioner("pipedream")
def pipedream(problem: Problem, control: SearchControl) -> Answer:
    """The chain of stages whose slowest stage is the fastest. States are cells of A, and what each was compared to."""
    number = problem.num_units
    ends = np.arange(number + 1)[:, None] + np.arange(number)[None, :] >= number
    return solved(problem, control, ends, [_PipeDreamCosts(problem, size, ends) for size in problem.sizes])


class _PipeDreamCosts(ChainCosts):
    """The costs of stages that begin and end at cuts of the chain."""

    def __init__(self, problem: Problem, size: int, members: NDArray[np.bool_]) -> None:
        super().__init__(replace(problem, recompute=problem.recompute is True), size, members)
        self.crossing = _crossing_bytes(problem, size)
        self.speeds = {
            number: weakest_link(problem.cluster, number).bytes_per_second
            for degree in self.degrees
            for number in (degree, 2 * degree)
        }

    def _degrees(self, most: int) -> list[int]:
        return list(range(1, most + 1))

    def stages(self, index: int, rests: NDArray[np.intp], crossing: Crossing) -> Iterator[Fitting]:
        """See `ChainCosts`; transfers go on while a stage computes."""
        parameters = self.parameters[index] - self.parameters[rests]
        alone = self._alone(index, rests, crossing)
        for degree in self.degrees:
            synced = gradient_seconds(degree, parameters, self.speeds[degree]) / self.problem.batch_size
            if degree > 1:
                synced = np.where(alone, np.inf, synced)
            rows, seconds, keeps = self._with_memory(index, rests, degree, synced, crossing.received)
            moved = float(self.crossing[index]) / self.size / degree / self.speeds[2 * degree]
            yield Fitting(degree, rows, np.maximum(seconds, moved), keeps)


def _crossing_bytes(problem: Problem, size: int) -> Array:
    """Bytes per micro-batch that cross the cut in front of so many last units, forward and backward."""
    crossing = np.zeros(problem.num_units + 1)
    for value in problem.units.values:
        crossing[value.src + 1 : max(value.dsts) + 1] += value.num_directions * value.bytes.at(size)
    return crossing[::-1]
