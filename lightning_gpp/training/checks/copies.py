"""Copies of the user's module on which steps run without a trace in the module itself, and what a step as a whole gives
its network calls there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.random import fork_rng
from torchmetrics import Metric

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.batch import known_to_pytree
from lightning_gpp.capture.calls import StepCalls, joint_batch
from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.capture.kept import kept_by, silenced
from lightning_gpp.capture.record import step_arguments
from lightning_gpp.capture.recording import CallArguments
from lightning_gpp.errors import CaptureError, ShapeError
from lightning_gpp.runtime.named_tensors import with_values
from lightning_gpp.runtime.random import Neutral, undisturbed
from lightning_gpp.stages.step import Answers
from lightning_gpp.training.host import TRAINING, Job
from lightning_gpp.training.tensors.foreign import Whereabouts, foreign_like
from lightning_gpp.training.tensors.parameters import flatten

SMALL: Final = 1 << 24
"""Bytes of a tensor in attributes that is copied, although it is not known that a step changes it."""


def silent_copy(
    module: nn.Module, device: torch.device, elsewhere: Mapping[str, Whereabouts] | None = None
) -> nn.Module:
    """A copy on a device, which logs nothing. What is `elsewhere` is foreign, as in training."""
    kept = (tensor for tensor in kept_by(module.modules()).tensors if tensor.nbytes <= SMALL and not tensor.is_meta)

    def made(name: str, tensor: Tensor) -> Tensor:
        if elsewhere and name in elsewhere:
            return foreign_like(tensor, device, [elsewhere[name]])
        return with_values(tensor, tensor.detach().to(device, copy=True))

    copied = private_copy(module, made, {id(tensor): tensor.detach().clone() for tensor in kept})
    for metric in (part for part in silenced(copied, module).modules() if isinstance(part, Metric)):
        metric.to(device)
    flatten(copied)
    return copied


def comparison(job: Job, found: StepCalls, batch: Any, num_samples: int) -> Any:
    """The arguments of all network calls of a step on a mini-batch, on the first rank. All ranks call this.

    None on all ranks if there is nothing to compare, or the step does not run on a copy of the module.
    """
    given, failure = None, ""
    lacks = any(parameter.is_meta for parameter in job.module.parameters())
    if job.control.first and job.options.self_check is not False and not lacks:
        try:
            given = joint_batch(given_arguments(job, found, batch), num_samples)
        except Exception as error:  # user code, without what training makes for it
            failure = f"{type(error).__name__}: {error}"
            job.host.inform(f"The self-check (strategy.self_check) is skipped: on a copy of the module, {failure}.")
    return None if job.control.broadcast(given is None) else given or {}


def given_arguments(job: Job, found: StepCalls, batch: Any) -> dict[str, CallArguments]:
    """The arguments of the first call of each module, from a run of the step on a copy of the user's module.

    Raises:
        CaptureError: the step does not call a module as it did on fake tensors.
        ShapeError: tensors have other shapes than there.
    """
    copied, given = silent_copy(job.module, job.device), dict[str, CallArguments]()
    vars(copied).update(job.host.stand_ins(copied))
    paths = {id(copied.get_submodule(path)): path for path in found.arguments}

    def answer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given.setdefault(paths[id(module)], _kept((args, kwargs)))
        with answers.suspended():
            return module(*args, **kwargs)

    answers, method = Answers(map(copied.get_submodule, found.arguments)), getattr(copied, TRAINING)
    with unnoticed(job), torch.enable_grad(), answers.given(answer), job.host.context(TRAINING)():
        method(_kept(known_to_pytree(batch)), *step_arguments(method, 0))
    if missing := found.arguments.keys() - given.keys():
        raise CaptureError(f"the step does not call {sorted(missing)} for this mini-batch")
    return {path: pytree.tree_map(_checked, known, given[path]) for path, known in found.arguments.items()}


def _kept(tree: Any) -> Any:
    """The same with copies of tensors, for values that the step may change."""
    return pytree.tree_map_only(Tensor, lambda each: each.detach().clone().requires_grad_(each.requires_grad), tree)


def _checked(known: Any, given: Any) -> Any:
    """The tensor that a call gets where it got one on fake tensors; other values are those of then."""
    if not isinstance(known, Tensor):
        return known
    if not isinstance(given, Tensor) or given.shape != known.shape:
        raise ShapeError(f"an argument of shape {tuple(known.shape)} is now {getattr(given, 'shape', given)}")
    return given


def unnoticed(job: Job) -> ExitStack:
    """A context without gradients, output, logs, and communication with others; random streams are kept."""
    stack, device = ExitStack(), job.device
    stack.enter_context(undisturbed())
    stack.enter_context(fork_rng([] if device.type == "cpu" else [device]))
    stack.enter_context(redirect_stdout(StringIO()))
    stack.enter_context(job.host.unheard())
    # torch.compile does not work under a dispatch mode, and remembers that for functions compiled there
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(torch.no_grad())
    stack.enter_context(job.control.mesh.peers(alone=True))
    stack.enter_context(Neutral())  # type: ignore[no-untyped-call]
    return stack
