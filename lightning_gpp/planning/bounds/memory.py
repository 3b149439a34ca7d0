"""Memory in the lower bound: what all stages hold at least, and the price of it.

Let r_u be the replicas of unit u's stage, c(r) the bytes that each of r replicas holds per byte of weights, a_u the
bytes that autograd saves in u for a micro-batch, and x_B = 1 if block B runs again, which takes e_B seconds per
micro-batch and frees d_B bytes. Every stage has a micro-batch in flight at some time; so on all devices, whose memory
is C in total,

    sum_u [ r_u c(r_u) p_u + a_u ] - sum_B x_B d_B <= C.

Whatever a step of T seconds satisfies, `K T >= cost(r, x)`, it also satisfies with this inequality, times any price
v >= 0 of a byte (in device-seconds), added to it (Lagrangian relaxation, weak duality). The minimum over r and x is
then one over each unit and each block, without any other condition:

    K T >= sum_u min_r [ cost_u(r) + v (r c(r) p_u + a_u) ] + sum_B min(0, M e_B - v d_B) - v C.

A stage that runs again as a whole has a_u when it does, one that offloads at the end of its forward. What several units
hold or save in common counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_gpp.costs.model import held_copies
from lightning_gpp.plan import STEP
from lightning_gpp.planning.problem.problem import Array, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The least that plans with micro-batches of one size hold.

    Args:
        weights: bytes of every unit on all its replicas together, by number of replicas (rows).
        saved: bytes of all units for one micro-batch.
        freed: bytes of every block that can run again.
        again: device-seconds of running each of them again in a step.
        capacity: bytes of all devices.
    """

    weights: Array
    saved: float
    freed: Array
    again: Array
    capacity: float

    def priced(self, price: float, worth: float) -> tuple[Array, float]:
        """Device-seconds for a price of a byte: by number of replicas and unit, and the rest.

        `worth`: what a device-second counts in which a block runs again.
        """
        rerun = np.minimum(0.0, worth * self.again - price * self.freed).sum()
        return price * self.weights, price * (self.saved - self.capacity) + float(rerun)


def least_memory(problem: Problem, size: int, replicas: Sequence[int]) -> LeastMemory:
    """The least memory of plans with micro-batches of `size` samples, for at least these numbers of replicas."""
    weights, saved = distinct_bytes(problem, size)
    sharding = "zero1" if problem.sharding == "auto" else problem.sharding
    copies = [
        number * held_copies(problem.footprint.copies, sharding, number * problem.num_pipelines) for number in replicas
    ]
    freed, again = _reruns(problem, size)
    return LeastMemory(
        weights=np.outer(copies, weights),
        saved=saved,
        freed=freed,
        again=again * problem.batch_size / size,
        capacity=float(problem.memory_bytes.sum()),
    )


def distinct_bytes(problem: Problem, size: int) -> tuple[Array, float]:
    """Bytes of weights by unit, and saved bytes for `size` samples in total."""
    graph, parameters, operators = problem.graph, set[str](), set[str]()
    weights, saved = problem.parameter_bytes.copy(), float(problem.saved_bytes(size).sum())
    for operator in graph:
        if operator.module == STEP:  # its stage may be another one
            parameters.update(operator.parameters)
    for index, unit in enumerate(problem.units.units):
        saved -= sum(graph[name].saved_bytes.at(size) for name in unit.operators if name in operators)
        inside = {parameter for name in unit.operators for parameter in graph[name].parameters}
        weights[index] -= sum(graph.parameter_bytes[name] for name in inside & parameters)
        parameters |= inside
        operators.update(unit.operators)
    return np.maximum(weights, 0.0), max(0.0, saved) if problem.footprint.training else 0.0


def _reruns(problem: Problem, size: int) -> tuple[Array, Array]:
    """Bytes that blocks free, and their seconds on the fastest kind of device."""
    if problem.recompute is not None or not problem.blocks:
        return np.zeros(0), np.zeros(0)
    figures = [problem.block_figures(size, kind) for kind in range(len(problem.cluster.kinds))]
    seconds = np.min([entry.seconds for entry in figures], axis=0)
    return np.maximum(figures[0].freed, 0.0), seconds
