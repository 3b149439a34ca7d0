"""The interface for plain training loops: makes an engine from a module, its optimizers and an example mini-batch."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_gpp.capture.record import StepFunction
from lightning_gpp.errors import ConfigError
from lightning_gpp.failure.hangs import Activity
from lightning_gpp.failure.limits import Limits
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.host import TRAINING, Host, Job
from lightning_gpp.training.measured.machine import footprint_of
from lightning_gpp.training.options import Context, Options
from lightning_gpp.training.sessions import compiled_steps
from lightning_gpp.training.setup import agreed_seed, set_up
from lightning_gpp.training.tensors.joining import join
from lightning_gpp.training.whole.whole_step import check_whole


@contextmanager
def initialize(
    module: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    example_batch: Any,
    *,
    step: StepFunction | None = None,
    options: Options | None = None,
    device: torch.device | None = None,
    context: Context = nullcontext,
    precision: torch.dtype | None = None,
) -> Iterator[Engine]:
    """Train a module in stages, in your own loop.

        with initialize(model, optimizer, batch, step=loss_of, options=Options(num_micro_batches=8)) as engine:
            for batch in batches:
                loss = engine.train_step(batch)
                optimizer.step()
                optimizer.zero_grad()

    All ranks of `torch.distributed` run the same loop. Inside the context each rank holds its part of the module, and
    its optimizers step that part; afterwards the module of global rank 0 is complete again. If one rank fails, all end.

    Args:
        module: the module, built in the same way on all ranks.
        optimizers: optimizers of the module's parameters.
        example_batch: a mini-batch; used only on global rank 0.
        step: computes the loss from the module, a mini-batch and, if it has a third parameter, the number of that,
            also for `Engine.evaluate`. Default: the module's method `training_step`.
        options: the same as the arguments of `GPPStrategy`. Default: a partitioner's plan for all ranks.
        device: the device of this rank, which becomes the current one. Default: the current CUDA device if the process
            group has NCCL for it, otherwise the CPU.
        context: makes the context in which modules compute, for example autocast.
        precision: the type that the context computes in.

    Raises:
        ConfigError: there is no process group, or an option cannot work.
        CaptureError, PlanError: the module cannot be trained in stages.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "There is no process group yet: call torch.distributed.init_process_group() first, in processes that "
            "torchrun started."
        )
    if (device := device or _default_device()).type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)  # for what asks for the current one: random streams, new process groups, kernels
    options, given = options or Options(), [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    control = join(options, dist.get_rank(), dist.get_world_size())
    describe = lambda: "the end of `initialize`" if ends else "set-up" if engine is None else engine.describe()  # noqa: E731
    wait = lambda: control.wait if engine is None else engine.wait()  # noqa: E731
    engine: Engine | None = None
    ends: bool = False
    monitor = FailureMonitor(
        rank=control.rank,
        world_size=control.world_size,
        limits=Limits.within(options.failure_timeout, options.timeout),
        activity=Activity(describe=describe, wait=wait, ends=lambda: ends),
    )
    with monitor, _with_step(module, step):
        job = Job(
            module=module,
            control=control,
            options=options,
            device=device,
            seed=agreed_seed(options.seed, control),
            num_nodes=_num_nodes(control),
            host=Host(context, precision),
            whole=options.step == "whole",
        )
        if job.whole:
            check_whole(options)
        for refusal in compiled_steps(module, [TRAINING]):
            raise ConfigError(refusal)
        engine = set_up(
            job,
            Incoming(module, control, options.batch_dims),
            example_batch,
            optimizers=given,
            footprint=footprint_of(given, "32-true"),
        )
        yield engine
        ends = True
        engine.release()


@contextmanager
def _with_step(module: nn.Module, step: StepFunction | None) -> Iterator[None]:
    """Inside, the module has the function as its methods for training and validation."""
    if step is None:
        yield
        return

    @functools.wraps(step, assigned=(), updated=())
    def method(self: nn.Module, batch: Any, *rest: int) -> Any:
        return step(self, batch, *rest)

    names = (TRAINING, "validation_step")
    vars(module).update(dict.fromkeys(names, MethodType(method, module)))
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]


def _default_device() -> torch.device:
    """The current CUDA device if the process group moves its tensors by NCCL, as that without a backend's name does."""
    on_gpus = f"cuda:{dist.Backend.NCCL}" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def _num_nodes(control: Control) -> int:
    """Number of machines of the job, according to torchrun; otherwise by their names."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", control.world_size))
    return max(control.world_size // processes, len(set(control.gather_all(socket.gethostname()))))
