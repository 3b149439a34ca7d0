"""Random generators of the user's own in attributes of the module: Python's, NumPy's and torch's.

The beginning of a step runs for its inputs, and again with the results of the network. What the first run draws is
drawn again by the second.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomSource = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A random generator of the user's own."""


def state_of(generator: RandomSource) -> Any:
    """The state of a generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: RandomSource, state: Any) -> None:
    """Give a generator a state again."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def unmoved(generators: Sequence[RandomSource]) -> Iterator[None]:
    """Restore generators afterwards."""
    before = list(map(state_of, generators))
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            set_state(generator, state)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)  # states have arrays in them


class OwnStreams:
    """Lets the run of a step that counts draw again what the run for its inputs drew.

    Runs for inputs go on from each other, and so do those that count. What is drawn behind the last module call comes
    after all that was drawn before, if a step draws nothing for its inputs.

    Args:
        generators: those that the step may draw from.
    """

    def __init__(self, generators: Sequence[RandomSource]) -> None:
        self._generators = generators
        self._begun: dict[tuple[int, int], dict[int, Any]] = {}

    def forget(self, lane: int) -> None:
        """Forget the runs for inputs of a mini-batch that is over, perhaps without the runs that count."""
        self._begun = {key: states for key, states in self._begun.items() if key[0] != lane}

    @contextmanager
    def finding(self, key: tuple[int, int]) -> Iterator[None]:
        """A run for inputs; `key` has the lane of the mini-batch, and the number of the micro-batch."""
        before = list(map(state_of, self._generators))
        yield
        states = zip(self._generators, before, strict=True)
        moved = {place: state for place, (each, state) in enumerate(states) if not _equal(state, state_of(each))}
        if moved:
            self._begun[key] = moved

    @contextmanager
    def counting(self, key: tuple[int, int]) -> Iterator[None]:
        """The run that counts."""
        begun = self._begun.pop(key, {})
        now = {place: state_of(self._generators[place]) for place in begun}
        self._set(begun)
        yield
        if self._begun:  # later micro-batches have begun
            self._set(now)

    def _set(self, states: Mapping[int, Any]) -> None:
        for place, state in states.items():
            set_state(self._generators[place], state)
