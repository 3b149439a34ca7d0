"""Users' hooks on gradients of parameters: `register_hook`, `register_post_accumulate_grad_hook`.

On one process a hook gets the gradient of a mini-batch. Here autograd would give it the part of each micro-batch. So
hooks wait during the backwards of a mini-batch, and get its gradient once, when it is complete:

    begin     hooks are off; gradients of earlier mini-batches are put aside
    end       the ranks that hold the parameter have its gradient g
    hooks     hook(g) for each `register_hook`; then g is added to those of earlier mini-batches
              hook(parameter) for each `register_post_accumulate_grad_hook`, which may step an optimizer

A hook belongs to the ranks that hold the parameter. Those that hold the same one have the same gradient, and their
hooks draw the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import gradient_hooks, with_gradient_hooks
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.random import RandomStreams
from lightning_gpp.training.host import Job
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.replicas import Layout, idle_sharding
from lightning_gpp.wording import some

_STREAM: Final = -2
"""The stage number under which hooks of parameters that several ranks hold draw their random numbers."""

_REMEDY: Final = "change gradients in the module's on_before_optimizer_step"


class ParameterHooks:
    """Lets the hooks of this rank's parameters wait for the gradients of mini-batches. All ranks call it together.

    Args:
        job: the job of the run.
        layout: the parameter placement.
        hooked: returns the module's parameters with hooks; it is called for each mini-batch.

    Attributes:
        waiting_for: the parameters whose hooks wait, with their gradients of earlier mini-batches.
    """

    def __init__(self, job: Job, layout: Layout, hooked: Callable[[], Sequence[Tensor]]) -> None:
        self._job, self._layout, self._hooked = job, layout, hooked
        self._streams = RandomStreams(job.seed, job.device)
        self.waiting_for: dict[Tensor, Tensor | None] = {}
        self._count = 0

    @property
    def exist(self) -> bool:
        """True if a parameter of any rank has hooks."""
        return bool(self._hooked())

    @contextmanager
    def waiting(self, *, accumulates: bool = False) -> Iterator[None]:
        """Inside, the backwards of a mini-batch run, without hooks.

        Args:
            accumulates: whether an optimizer step takes several mini-batches, of which gradients are summed over ranks
                once.

        Raises:
            ConfigError: the hooks cannot get what they get on one process.
        """
        self.waiting_for = {}
        hooked = self._hooked()
        if not hooked:
            yield
            return
        check_hooks(self._job, self._layout.plan)
        if accumulates:
            self._check_accumulation(hooked)
        here = [parameter for parameter in hooked if not parameter.is_meta]
        self.waiting_for, self._count = {parameter: parameter.grad for parameter in here}, self._count + 1
        for parameter in here:
            parameter.grad = None
        try:
            with _without_hooks(here):
                yield
        except BaseException:
            self.waiting_for = {}
            raise

    def run(self) -> None:
        """Run all hooks on the gradients of the mini-batch, which are complete."""
        self.change_gradients()
        self.after_accumulation()

    @torch.no_grad()
    def change_gradients(self) -> None:
        """Run the hooks that get a gradient, and add it to those of earlier mini-batches."""
        for parameter, before in reversed(list(self.waiting_for.items())):
            if parameter.grad is not None:
                with self._drawing_alike(parameter):
                    parameter.grad = _added(before, _hooked(parameter, parameter.grad))
            else:
                parameter.grad = before
                del self.waiting_for[parameter]

    @torch.no_grad()
    def after_accumulation(self) -> None:
        """Run the hooks that get a parameter after that; not if its gradient was dropped since."""
        for parameter in reversed(self.waiting_for):
            if parameter.grad is not None:
                with self._drawing_alike(parameter):
                    for hook in list(gradient_hooks(parameter)[1].values()):
                        hook(parameter)
        self.waiting_for = {}

    def _drawing_alike(self, parameter: Tensor) -> AbstractContextManager[None]:
        """Inside, the ranks that hold a parameter draw the same random numbers."""
        number, name = _place(self._job.module, parameter)
        shared = self._job.control.mesh.most_members > 1 or self._is_shared(name)
        return self._streams.use(_STREAM, 0, number, self._count) if shared else nullcontext()

    def _is_shared(self, name: str) -> bool:
        return self._job.control.num_pipelines * len(self._layout.placement.devices[name]) > 1

    def _check_accumulation(self, hooked: Sequence[Tensor]) -> None:
        """Raise ConfigError if the gradients of mini-batches are never complete one by one."""
        names = [_place(self._job.module, parameter)[1] for parameter in hooked]
        names = [name for name in names if self._is_shared(name) or self._job.options.weights != SYNCHRONOUS]
        if names:
            raise ConfigError(
                f"{_subject(names)}, which get the gradient of each mini-batch. An optimizer step takes several ones "
                "(trainer.accumulate_grad_batches), and replicas (strategy.num_pipelines, stages on several devices) "
                "and asynchronous weights (strategy.weights) sum their gradients up once, before the step. Train with "
                f"trainer.accumulate_grad_batches=1, or {_REMEDY}."
            )


def check_hooks(job: Job, plan: Plan) -> None:
    """Raise ConfigError if a parameter has hooks that cannot get what they get on one process."""
    hooked = {name: each for name, each in job.module.named_parameters() if with_gradient_hooks([each])}
    cut = [name for name in hooked if job.parallel is not None and name in job.parallel.cut]
    late = [name for name, parameter in hooked.items() if gradient_hooks(parameter)[1]]
    if hooked and plan.sharding == "fsdp" and not idle_sharding(plan, job.control.num_pipelines):
        raise ConfigError(
            f"{_subject(list(hooked))}, of which strategy.sharding=fsdp gives every rank only a part. Use "
            f"strategy.sharding=zero1, or {_REMEDY}."
        )
    if cut:
        raise ConfigError(
            f"{_subject(cut)}, of which strategy.tensor_parallel_size gives every process only a part. Leave these "
            f"modules undivided in configure_model, or {_REMEDY}."
        )
    if late and job.options.weights != SYNCHRONOUS:
        raise ConfigError(
            f"{_subject(late)} by register_post_accumulate_grad_hook, which may change weights that mini-batches in "
            f"the pipeline compute with (strategy.weights={job.options.weights}). Use register_hook, "
            f"strategy.weights=synchronous, or {_REMEDY}."
        )


def _subject(names: Sequence[str]) -> str:
    return f"The parameters {some(names, most=3)} have hooks on their gradients"


def _place(module: nn.Module, parameter: Tensor) -> tuple[int, str]:
    """The number of a parameter, and its name."""
    named = enumerate(module.named_parameters())
    return next((number, name) for number, (name, each) in named if each is parameter)


def _hooked(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Run the hooks on a gradient; returns the result in memory of its own: hooks may keep what they got and gave."""
    hooks = list(gradient_hooks(parameter)[0].values())
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient.detach().clone() if hooks else gradient


def _added(before: Tensor | None, fresh: Tensor) -> Tensor:
    return fresh if before is None else before.add_(fresh)


@contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the parameters' hooks are off; those that are registered inside stay."""
    tables = [table for parameter in parameters for table in gradient_hooks(parameter)]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)
