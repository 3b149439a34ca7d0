"""Random streams: every stage draws its own random numbers, whatever else its device computes, and user code draws from
the streams of the process: Python's, NumPy's, and torch's on the CPU and on the current GPU.

Runs that are compared draw alike: masks of ones (`Neutral`), or their samples' shares of a run on all (`Draws`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from lightning_gpp._compat.torch import TorchDispatchMode, schema_arguments

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the increment of the splitmix64 generator."""


def mix(*numbers: int) -> int:
    """A 64-bit hash of integers in which each position counts: splitmix64 (Steele et al. 2014, OOPSLA, figure 15)."""
    state = 0
    for number in numbers:
        state = _scramble((state + _GOLDEN + (number & _MASK)) & _MASK)
    return state


def _scramble(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class RandomStreams:
    """One stream of random numbers per (stage, pipeline, first sample, step), without state: nothing to checkpoint.

    Args:
        seed: seed of the run; the same on all ranks.
        device: device of the stages; its default generator is seeded besides the CPU's.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self.seed = seed
        self._generators = [torch.default_generator]
        if device is not None and device.type == "cuda":
            torch.cuda.init()  # makes the default generators
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    def key(self, stage: int, pipeline: int, sample: int, step: int) -> int:
        """The 64-bit seed of a stream."""
        return mix(self.seed, stage, pipeline, sample, step)

    @contextmanager
    def use(self, stage: int, pipeline: int, sample: int, step: int) -> Iterator[None]:
        """Inside, draws come from this stream; afterwards the caller's stream continues untouched."""
        key = self.key(stage, pipeline, sample, step)
        states = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(key)
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


@contextmanager
def undisturbed(numpys: np.random.BitGenerator | None = None) -> Iterator[None]:
    """Restore all streams of the process when the context ends, whatever was drawn inside.

    `numpys`: takes the place of NumPy's generator inside, which is many times faster than to copy the state of that.
    """
    python, restore = random.getstate(), _numpy_replaced_by(numpys) if numpys is not None else _numpy_copied()
    generators = [(generator, generator.get_state()) for generator in current_generators()]
    try:
        yield
    finally:
        random.setstate(python)
        restore()
        for generator, state in generators:
            generator.set_state(state)  # without a copy, which would be fake among fake tensors


def _numpy_copied() -> Callable[[], None]:
    return partial(np.random.set_state, np.random.get_state())


def _numpy_replaced_by(other: np.random.BitGenerator) -> Callable[[], None]:
    before = mtrand.get_bit_generator()
    mtrand.set_bit_generator(other)
    return partial(mtrand.set_bit_generator, before)


def current_generators() -> list[torch.Generator]:
    """Torch's default generators on the CPU, and on the current GPU if this process uses one."""
    gpu = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []
    return [torch.default_generator, *gpu]


def python_streams() -> tuple[object, ...]:
    """The states of Python's and NumPy's streams: equal after equally many draws from equal states."""
    kind, numbers, *rest = np.random.get_state()
    return random.getstate(), str(kind), np.asarray(numbers).tobytes(), *rest


def seed_streams(seed: int) -> None:
    """Seed all streams of the process with `seed`, a number of up to 63 bits."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    for generator in current_generators():
        generator.manual_seed(seed)


_RATES: Final = ("dropout_p", "dropout")
"""Names of the rate of dropout among the arguments of fused operators, and of their backwards."""
_SEED: Final = "dropout_seed"
"""An argument of the operator that only makes a state for dropout, which needs a rate."""


class Neutral(TorchDispatchMode):
    """Inside, every draw starts from the same seed, masks (Bernoulli draws) are all ones, and fused operators such as
    attention have no dropout: neither they, nor their backwards, which would take a mask that was never drawn.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(args), dict(kwargs or {})
        for place, name in _rates_of(func):
            if name in kwargs:
                kwargs[name] = 0.0
            elif place < len(args):
                args[place] = 0.0
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0] / (1 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        for generator in current_generators():  # torch.manual_seed asks all kinds of devices, and is slow
            generator.manual_seed(0)
        result = func(*args, **kwargs)
        if "bernoulli" in func.name() and isinstance(result, torch.Tensor):
            result.fill_(1)
        return result


@functools.cache
def _rates_of(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of an operator's rates of dropout among its arguments."""
    return tuple(_found_in([argument.name for argument in schema_arguments(func)]))


def _found_in(names: list[str]) -> Iterator[tuple[int, str]]:
    if _SEED not in names:
        yield from ((place, name) for place, name in enumerate(names) if name in _RATES)


_OF_ALL_SAMPLES: Final = ("randperm", "multinomial")


class NoShare(Exception):
    """Some samples have no share in a draw, because it mixes them."""


class Draws(TorchDispatchMode):
    """Records the draws of a first run; inside `share` runs on some of its samples repeat them.

    Args:
        total: samples of the first run.
    """

    def __init__(self, total: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._total, self._tape = total, list[Tensor]()
        self._share: slice | None = None
        self._next = 0

    @contextmanager
    def share(self, start: int, stop: int) -> Iterator[None]:
        """Inside, draws are those of samples `[start, stop)`."""
        self._share, self._next = slice(start, stop), 0
        try:
            yield
        finally:
            self._share = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(result, Tensor):
            return result
        if any(name in func.name() for name in _OF_ALL_SAMPLES):
            raise NoShare
        if self._share is None:
            self._tape.append(result.clone())
        else:
            result.copy_(self._repeated(result, self._share))
        return result

    def _repeated(self, result: Tensor, share: slice) -> Tensor:
        if self._next == len(self._tape):
            raise NoShare
        drawn, self._next = self._tape[self._next], self._next + 1
        if drawn.shape == result.shape:
            return drawn
        if drawn.dim() == 0 or drawn.shape[0] != self._total or drawn[share].shape != result.shape:
            raise NoShare
        return drawn[share]
