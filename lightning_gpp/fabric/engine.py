"""The module of a Fabric loop: it is divided at its first call, whose arguments show what is to be planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from lightning.fabric.plugins import Precision
from torch import nn
from torch.optim import Optimizer

from lightning_gpp.capture.calls import StepCalls
from lightning_gpp.checkpoints.layout import KEY
from lightning_gpp.errors import ConfigError
from lightning_gpp.strategy.data import AgreedLoader
from lightning_gpp.training.control import Control, Mirror
from lightning_gpp.training.data.batches import outline
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.data.loaders import read_in_world
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.host import Host, Job
from lightning_gpp.training.measured.machine import footprint_of
from lightning_gpp.training.options import Options
from lightning_gpp.training.sessions import compiled_steps
from lightning_gpp.training.setup import agreed_seed, set_up
from lightning_gpp.training.updates.gradients import LossScale, check_scaled

_END: Final = object()
"""Comes after the last mini-batch."""
_TYPES = {"bf16": torch.bfloat16, "16": torch.float16}


class PipelinedModule(nn.Module):
    """Calls a module in stages; `fabric.setup` returns it in a wrapper of Fabric's.

    Args:
        module: the user's module.
        call: calls it.
    """

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.module = module
        vars(self)["_call"] = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module, on all ranks.

        Raises:
            ConfigError: Fabric redirects another method of the module to its forward.
        """
        if "forward" in vars(self.module):
            raise ConfigError(
                f"A method of {type(self.module).__name__} other than its forward was called through Fabric "
                "(model.training_step, or one of mark_forward_method), but calls of the module itself are what runs in "
                "stages. Call model(...), and compute the loss in the loop."
            )
        return vars(self)["_call"](self.module, args, kwargs)


def undivided(module: nn.Module) -> nn.Module:
    """The user's module, without the wrapper."""
    return module.module if isinstance(module, PipelinedModule) else module


class LazyEngine:
    """Sets up an engine at the first call of a module.

    Args:
        module: the user's module.
        options: options of the strategy.
        control: the side channel of this rank.
        precision: Fabric's precision plugin.
        device: the device of this rank.
        num_nodes: number of machines of the job.

    Attributes:
        engine: None before the first call.
        optimizers: optimizers of the module.
        num_calls: number of calls in earlier runs, from which random streams continue.
        seed: seed of the random streams; None leaves it to rank 0.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        *,
        control: Control,
        precision: Precision,
        device: torch.device,
        num_nodes: int,
    ) -> None:
        for refusal in compiled_steps(module, ()):
            raise ConfigError(refusal)
        self.module, self._options, self._control = module, options, control
        self._precision, self._device, self._num_nodes = precision, device, num_nodes
        self.engine: Engine | None = None
        self.optimizers: list[Optimizer] = []
        self.num_calls, self.seed = 0, options.seed
        scaler = getattr(precision, "scaler", None)
        if scaler is not None:
            check_scaled(options)
        self._scale = LossScale.of(scaler, control, device)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module in stages; all ranks call this together, with equal arguments."""
        if self.engine is None:
            self.engine = self._set_up((args, kwargs))
        with self.engine.whole_step():
            return self.module(*args, **kwargs)

    def _set_up(self, arguments: Any) -> Engine:
        precision = str(self._precision.precision)
        host = Host(self._precision.forward_context, _TYPES.get(precision.split("-")[0]))
        job = Job(
            module=self.module,
            control=self._control,
            options=self._options,
            device=self._device,
            seed=agreed_seed(self.seed, self._control),
            num_nodes=self._num_nodes,
            host=host,
            whole=True,
        )
        with torch.inference_mode(False), torch.enable_grad():
            engine = set_up(
                job,
                Incoming(self.module, self._control, self._options.batch_dims),
                arguments,
                optimizers=self.optimizers,
                footprint=footprint_of(self.optimizers, precision),
                num_steps=self.num_calls,
                calls=StepCalls({"": outline(arguments)}, frozenset()),
            )
        if self._scale is not None:
            self._scale.attach()
        return engine

    def resume(self, num_calls: int, seed: int) -> None:
        """Continue the random streams of another run; the options' seed has precedence, and that of a set-up engine."""
        self.num_calls, self.seed = num_calls, self.seed if self.seed is not None else seed
        if self.engine is not None:
            self.engine.num_steps = num_calls

    def end(self, complete: bool) -> None:
        """Move the module to the CPU, after a normal end (`complete`) all of it to rank 0. All ranks call this."""
        if self.engine is not None:
            if self._scale is not None:
                self._scale.detach()
            (self.engine.release if complete else self.engine.abandon)()
            self.engine = None


# -- data: loops run on every rank, so each pipeline's first rank loads them for all of it


class MirroredLoader(AgreedLoader):
    """A data loader whose mini-batches, and random numbers, all ranks of a pipeline have alike.

    Args:
        loader: loads the data; iterated over on the first rank of the pipeline only.
        control: the side channel of this rank.
        mirror: gives mini-batches to the other ranks.
    """

    def __init__(self, loader: Iterable[Any], control: Control, mirror: Mirror) -> None:
        super().__init__(loader, control)
        self._mirror = mirror

    def __iter__(self) -> Iterator[Any]:
        batches = read_in_world(self.loader, self.control.mesh) if self.control.runs_step else iter(())
        while True:
            batch = next(batches, _END)
            if not self.control.share_flag(batch is not _END):
                return
            batch = self._mirror.tree(None if batch is _END else batch)
            self._mirror.streams()
            yield batch


# -- checkpoints: an entry besides the user's objects, and parts of optimizers in files


@dataclass(frozen=True, slots=True)
class DividedOptimizer:
    """An optimizer of a divided module, as `fabric.load` finds it: it loads this rank's part of a state."""

    engine: Engine
    optimizer: Optimizer

    def state_dict(self) -> dict[str, Any]:
        """The undivided state."""
        return self.engine.optimizer_state_dict(self.optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the undivided optimizer."""
        self.engine.load_optimizer_state_dict(self.optimizer, state)


def loaded_into(state: dict[str, Any], engine: Engine | None, load: Callable[[dict[str, Any]], Any]) -> Any:
    """Load into the objects of a state, optimizers of a divided module included; other entries are replaced in it."""
    divided = {name for name, each in state.items() if isinstance(each, Optimizer) and engine is not None}
    wrapped = {name: DividedOptimizer(engine, each) if name in divided else each for name, each in state.items()}  # type: ignore[arg-type]
    rest = load(wrapped)
    state.update({name: each for name, each in wrapped.items() if name not in divided})
    return rest


def entry_for(engine: Engine | None) -> dict[str, Any]:
    """This library's entry of a checkpoint."""
    return {} if engine is None else {KEY: {"seed": engine.job.seed, "step": engine.num_steps}}
