"""Every private name of torch and Lightning that this library uses, each with the reason, so that an upgrade has one
place to look at."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # torch.export stands on it; no public name yet
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# --- torch: recording ---


@contextmanager
def checkpoint_regions(enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
    """Announce every activation-checkpointed region; inside the context regions run without checkpointing."""
    plain = (_checkpoint.CheckpointFunction, _checkpoint._checkpoint_without_reentrant_generator)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            enter()
            try:
                return function(*args)
            finally:
                leave()

    def non_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        enter()
        try:
            yield
        finally:
            leave()

    _checkpoint.CheckpointFunction = Reentrant  # type: ignore[misc, assignment]
    _checkpoint._checkpoint_without_reentrant_generator = non_reentrant
    try:
        yield
    finally:
        _checkpoint.CheckpointFunction, _checkpoint._checkpoint_without_reentrant_generator = plain  # type: ignore[misc]


@contextmanager
def autograd_function_calls(handler: Callable[..., Any]) -> Iterator[None]:
    """Route `SomeFunction.apply(...)` of custom autograd functions to `handler(cls, plain_apply, args, kwargs)`."""
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return handler(cls, functools.partial(plain.__func__, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]


# --- torch: what torch.compile made ---


def uncompiled(function: Any) -> Any:
    """What `torch.compile` was given, if it made this function; else the function."""
    while getattr(function, "_torchdynamo_wrapper_id", None) == id(function):
        function = function._torchdynamo_orig_callable
    inline = getattr(function, "__code__", None)  # torch puts a function of its own around those of torch.nn
    is_torchs = inline is not None and inline.co_filename.endswith("external_utils.py")
    return function.__wrapped__ if is_torchs else function


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of a module run what `torch.compile` made: of it, in its place, or of its forward."""
    forward = vars(module).get("forward")
    in_place = vars(module).get("_compiled_call_impl") is not None
    return in_place or wraps_compiled(module) or uncompiled(forward) is not forward


def wraps_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is what `torch.compile(module)` returned. Copies of it are made right by torch."""
    from torch._dynamo import OptimizedModule  # takes a second to load, and was loaded if there is one

    return isinstance(module, OptimizedModule)


# --- Lightning: imported inside the functions, so that what needs torch alone does not load Lightning ---


LAUNCHER = "GPP_LAUNCHER_PID"
"""Environment variable by which processes that the launcher started know their parent."""


def subprocess_launcher(environment: Any, num_processes: int, num_nodes: int) -> Any:
    """Lightning's launcher that starts the script again for every further process; it has no public name."""
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

    class Launcher(_SubprocessScriptLauncher):
        def _call_children_scripts(self) -> None:
            os.environ[LAUNCHER] = str(os.getpid())
            try:
                super()._call_children_scripts()
            finally:
                del os.environ[LAUNCHER]

    return Launcher(environment, num_processes, num_nodes)


def init_process_group(environment: Any, backend: str, **kwargs: Any) -> None:
    """As DDPStrategy does it, environment variables included."""
    from lightning.fabric.utilities.distributed import _init_dist_connection

    _init_dist_connection(environment, backend, **kwargs)


def default_backend(device: torch.device) -> str:
    """NCCL for CUDA, gloo for CPU, as Lightning decides it."""
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device

    return str(_get_default_process_group_backend_for_device(device))


def install_automatic_optimization(trainer: Any) -> None:
    """Replace the optimization loop of `trainer` by one that zeroes gradients before the step instead of after it.

    A pipelined step computes gradients, so what Lightning does between step and backward would erase them.
    """
    from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization

    class PipelinedClosure(Closure):
        calls = 0

        @torch.enable_grad()
        def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
            self.calls += 1
            if self.calls > 1:
                raise _closure_repeated()
            if self._zero_grad_fn is not None:
                self._zero_grad_fn()
            output = self._step_fn()
            if self._backward_fn is not None and output.closure_loss is not None:
                self._backward_fn(output.closure_loss)
            return output

    class PipelinedOptimization(_AutomaticOptimization):
        def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
            plain = super()._make_closure(kwargs, optimizer, batch_idx)
            return PipelinedClosure(plain._step_fn, plain._backward_fn, plain._zero_grad_fn)

    epoch_loop = trainer.fit_loop.epoch_loop
    plain = epoch_loop.automatic_optimization
    loop = PipelinedOptimization(trainer)
    loop.optim_progress, loop._skip_backward = plain.optim_progress, plain._skip_backward
    epoch_loop.automatic_optimization = loop


def _closure_repeated() -> Exception:
    from lightning_gpp.errors import ConfigError

    return ConfigError(
        "The optimizer called its closure more than once in one step. Optimizers that evaluate the model repeatedly "
        "(L-BFGS, sharpness-aware minimisation) use norms over all parameters, of which every rank has only its own. "
        "Use one that needs a single evaluation."
    )


def keep_batch(batch: Any, dataloader_idx: int = 0) -> Any:
    return batch


def bypass_batch_hooks(module: Any) -> None:
    """Let the batch-transfer hooks of `module` be skipped: this rank has placeholders instead of batches.

    The loops call a private method that calls the user's hook; there is no public place before it.
    """
    module._on_before_batch_transfer = keep_batch


def restore_batch_hooks(module: Any) -> None:
    vars(module).pop("_on_before_batch_transfer", None)


def transferred(module: Any, batch: Any, device: torch.device) -> Any:
    """The batch after precision conversion and the user's transfer hooks, as the loops call them."""
    batch = module.trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)


def attach_data(trainer: Any, module: Any, datamodule: Any) -> None:
    """Make module, data and trainer known to each other as `trainer.fit` does, so that their hooks can be called."""
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=datamodule)


def set_rank_zero(rank: int) -> None:
    """Lightning's `rank_zero_*` functions keep the rank as an attribute of a function, in two packages."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning_utilities.core.rank_zero import rank_zero_only as shared

    for function in (rank_zero_only, shared):
        function.rank = rank  # type: ignore[attr-defined]


def on_epoch_end_reached(trainer: Any, function: Callable[[], None]) -> None:
    """Call `function` before Lightning computes the values of an epoch.

    In evaluation this happens before any hook, so that a callback would come too late.
    """
    connector = trainer._logger_connector
    plain = type(connector).epoch_end_reached

    def epoch_end_reached() -> None:
        function()
        plain(connector)

    connector.epoch_end_reached = epoch_end_reached


def restore_epoch_end(trainer: Any) -> None:
    vars(trainer._logger_connector).pop("epoch_end_reached", None)


def current_hook(module: Any) -> str | None:
    """Name of the hook that Lightning is running on `module`."""
    name: str | None = module._current_fx_name
    return name


@contextmanager
def running_hook(module: Any, name: str | None) -> Iterator[None]:
    """`self.log` asks which hook it is called from."""
    previous, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = previous


def uses_dataloader_iter(step: Callable[..., Any]) -> bool:
    """Whether a step takes the iterator instead of a batch, as the loops find out."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    return bool(is_param_in_hook_signature(step, "dataloader_iter", explicit=True))


def keep_sigterm_handler(trainer: Any) -> None:
    """Let Lightning leave SIGTERM's handler as it is now, instead of the one it found when the run started."""
    handlers = trainer._signal_connector._original_handlers
    if signal.SIGTERM in handlers:
        handlers[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)


def disable_sigterm_broadcast(trainer: Any) -> None:
    """Take the broadcast out of Lightning's SIGTERM handler: inside a handler it waits for ranks that wait elsewhere.

    The handler that was there before is still called; only the connector decides which functions that are.
    """
    trainer._signal_connector._sigterm_notifier_fn = lambda number, frame: None


def optimizer_to_device(optimizer: Any, device: torch.device) -> None:
    from lightning.fabric.utilities.optimizer import _optimizer_to_device

    _optimizer_to_device(optimizer, device)


def reset_metric(metric: Any, value: Any, count: int) -> None:
    """Say that a torchmetrics object has been updated elsewhere, and what its last batch gave."""
    metric._update_count = count
    metric._computed = None
    metric._forward_cache = value


def metric_state(metric: Any) -> tuple[dict[str, Any], int]:
    """State of a torchmetrics object by name, and how often it was updated."""
    return {name: getattr(metric, name) for name in metric._defaults}, int(metric._update_count)


def forward_cache(metric: Any) -> Any:
    """What a torchmetrics object's last batch gave."""
    return metric._forward_cache


def set_forward_cache(metric: Any, value: Any) -> None:
    metric._forward_cache = value


def reduce_over(tensor: torch.Tensor, group: Any, reduce_op: Any) -> torch.Tensor:
    """Lightning's own reduction, with its names for operations and its handling of means on gloo."""
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available

    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


def gather_over(tensor: torch.Tensor, group: Any, sync_grads: bool) -> torch.Tensor:
    """Lightning's own gathering, with gradients where wanted."""
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available

    return _all_gather_ddp_if_available(tensor, group, sync_grads=sync_grads)


def forget_indices(batch_sampler: Any) -> None:
    """Let prediction writers find no indices of samples, where a loader's batch sampler is never iterated."""
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

    if isinstance(batch_sampler, _IndexBatchSamplerWrapper):
        batch_sampler.seen_batch_indices = []


def first_training_batch(trainer: Any, peek: Callable[[Any], Any] | None) -> Any:
    """Set the training data loaders up now instead of when the loop starts, and `peek` at each one's first batch."""
    from torch.utils._pytree import tree_unflatten

    trainer.fit_loop.setup_data()
    combined = trainer.fit_loop._combined_loader
    if combined is None or peek is None:
        return None
    return tree_unflatten([peek(loader) for loader in combined.flattened], combined._spec)
