"""Collectives of the ranks that hold the same parameters in a training run, as the plan's `sharding` requires."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)
from torch.utils.hooks import RemovableHandle

from lightning_gpp._compat.torch import trained_flags, with_gradient_hooks
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.concurrent import Streams
from lightning_gpp.runtime.gradients import GradientSync
from lightning_gpp.runtime.named_tensors import tensors_of
from lightning_gpp.runtime.recorded import Recording
from lightning_gpp.runtime.sharding import OwnedParameters, ShardedStages, assign_owners
from lightning_gpp.runtime.transport import Transport
from lightning_gpp.training.asynchronous import Asynchronous
from lightning_gpp.training.host import Job
from lightning_gpp.training.tensors.foreign import KnownNorms, exchanged
from lightning_gpp.training.tensors.parameters import Layout, check_grown
from lightning_gpp.training.tensors.shards import whole_states
from lightning_gpp.training.updates.optimizers import OptimizerIndex
from lightning_gpp.wording import some

ELEMENTWISE: Final = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop)
"""Optimizers that treat the elements of a parameter independently, so that they can step shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The job, layout and transport that the steps of a run share.

    Args:
        job: the job of the run.
        layout: who owns what.
        transport: transport to the other devices.
        replicas: collectives of ranks with the same parameters; None if there are none.
        asynchronous: training without a flush between mini-batches; None flushes after each.
        recording: records what stages launch; None records nothing.
        streams: streams for stages that compute at the same time; None computes one after the other.
    """

    job: Job
    layout: Layout
    transport: Transport
    replicas: Replicas | None = None
    asynchronous: Asynchronous | None = None
    recording: Recording | None = None
    streams: Streams | None = None


class Replicas:
    """Owns the `StageSync` of a training run, and, with ZeRO-1, the owners of parameters.

    All ranks construct it together, after parameters were placed and before optimizers have any state.

    Args:
        job: the job of the run.
        layout: who owns what.
        indices: indices of the optimizers, which afterwards step only this rank's parameters.
        cut: whether backwards are those of micro-batches.

    Attributes:
        sharding: the plan's sharding, or "none" if no two ranks hold the same parameter.

    Raises:
        ConfigError: an optimizer cannot step parts of parameters, parameters have hooks on their gradients, or members
            of a device have divided what is sharded.
        PlanError: a parameter that several stages use would be sharded.
    """

    def __init__(self, job: Job, layout: Layout, indices: Sequence[OptimizerIndex], *, cut: bool = True) -> None:
        self.module, self.layout, self.control, self._parallel = job.module, layout, job.control, job.parallel
        self._device, self._indices = job.device, indices
        idle = idle_sharding(layout.plan, job.control.num_pipelines)
        if idle:
            job.control.warn(idle)
        self.sharding = "none" if idle else layout.plan.sharding
        if self.sharding == "fsdp" and job.parallel is not None:
            raise ConfigError(
                "The plan has sharding=fsdp, but tensor parallelism (tensor_parallel_size) has already divided the "
                "parameters. Use strategy.sharding=zero1, which splits the optimizer's state."
            )
        self._cut = cut
        self._facts = self._current_facts()
        self._pending, self._trained, self._frozen_since = False, self._names_trained(), set[str]()
        self._once_trained = set[str]()
        """Parameters that were trained before; optimizers step them as long as their gradients are zero, not None."""
        self._owned: OwnedParameters | None = None
        self._hooks: list[RemovableHandle] = []
        if self.sharding == "zero1":
            self._owned = self._with_owners()
            self._hooks = [index.optimizer.register_step_post_hook(self._publish) for index in indices]
        if self.sharding == "fsdp":
            check_elementwise([index.optimizer for index in indices])
        self._sync = self._made()
        for index in indices:
            index.keep(self._stepped_here(), self._stepped(), tensors_of(job.module))

    @property
    def sync(self) -> GradientSync | ShardedStages:
        """The current `StageSync`. It is replaced when parameters are frozen or added, so look it up each time."""
        return self._sync

    @property
    def sharded(self) -> set[str]:
        """Names of this rank's sharded parameters."""
        return self._sync.sharded if isinstance(self._sync, ShardedStages) else set()

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self.layout.plan.stages_on(self.control.device)

    # -- a mini-batch -------------------------------------------------------------------------------------------------

    def begin(self, last: bool) -> None:
        """Begin a mini-batch. `last`: an optimizer step follows."""
        if self._frozen_since and not self._pending:  # the step that they were in is over
            self._frozen_since = set()
            self._renew()
        self.follow()
        self._sync.last, self._pending = last, True

    def agree(self, digest: int) -> bool:
        """True if this mini-batch may use the program's collectives: all pipelines issue them in the same order.

        Pipelines whose mini-batches differ in form or size may issue different ones. All ranks call this, unless there
        are no collectives.

        Args:
            digest: fingerprint of the collectives; 0 if they cannot be as in the program.
        """
        if self.control.num_pipelines == 1 or not self.meets:
            return digest != 0
        most = torch.tensor([digest, -digest])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.control.everyone)
        return most[0].item() == -most[1].item() != 0

    @property
    def meets(self) -> bool:
        """True if the current mini-batch uses the program's collectives."""
        return self.sharding == "fsdp" or self._sync.last

    @contextmanager
    def gathered(self, training: bool) -> Iterator[None]:
        """Inside, all parameters of this rank's stages are unsharded; afterwards their gradients are reduced."""
        for stage in self.stages:
            self._sync.unshard(stage)
            self._sync.ready(stage)
        yield
        for stage in reversed(self.stages):
            if training:
                self._sync.reduce(stage)
            self._sync.reshard(stage)

    def finish(self) -> None:
        """Make gradients sums over the replicas, after the last mini-batch before a step."""
        if self._sync.reduces:
            self._sync.sync()
        self._pending = False
        added = self.follow()
        if added:  # given to an optimizer since the mini-batch began
            self._sum(added)

    def grad_norm(self, norm_type: float = 2.0, names: Collection[str] | None = None) -> Tensor:
        """The norm of the full model's gradient, or of that of some parameters; all ranks call this."""
        if names is not None and isinstance(self._sync, GradientSync):
            return self._sync.grad_norm(norm_type, names)
        return self._sync.grad_norm(norm_type)

    def known_norms(self) -> KnownNorms | None:
        """The norms of all gradients; None where ranks have parts of some. All ranks call this together."""
        if self.sharding == "fsdp" or self._parallel is not None:
            return None
        return exchanged(self.module, set(self.layout.held_by(self.control.device)), self.control)

    def end(self) -> None:
        """Give the module unsharded parameters for good, and the optimizers' states to the ranks that save them.

        All ranks call it.
        """
        for hook in self._hooks:
            hook.remove()
        if not isinstance(self._sync, ShardedStages) and self._parallel is None:
            return
        with self._shown():
            shards = tensors_of(self.module)
            states = [whole_states(index.ordered_state(), shards, self._held(index)) for index in self._indices]
        if isinstance(self._sync, ShardedStages):
            self._sync.restore()
        if self._parallel is not None:
            self._parallel.undivide(self.module)
        for index, state in zip(self._indices, states, strict=True):
            index.put(tensors_of(self.module), state)

    def _shown(self) -> AbstractContextManager[None]:
        """Inside, the module has the shapes of undivided parameters."""
        return nullcontext() if self._parallel is None else self._parallel.shown(self.module)

    def _held(self, index: OptimizerIndex) -> set[str]:
        """The parameters of which this process has the optimizer's state after the run."""
        if self._owned is None:
            return self.layout.saved_here(self.control)
        return index.kept if self.control.member == 0 else set()

    def _publish(self, optimizer: Optimizer, *_: object) -> None:
        """Give all holders the parameters that the owners computed, after a step of an optimizer."""
        for index in self._indices:
            if index.optimizer is optimizer and self._owned is not None:
                self._owned.publish(index.names, self._once_trained)

    # -- construction -------------------------------------------------------------------------------------------------

    def follow(self) -> set[str]:
        """Take up parameters that hooks froze, unfroze or gave to an optimizer; returns the names of the latter."""
        facts = self._current_facts()
        if facts == self._facts:
            return set()
        known = self._names()
        for index in self._indices:
            index.refresh(self.module, self._stepped_here(), self._stepped())
        check_grown(self.module, self.layout.devices.keys(), self._names())
        self._facts = facts
        before, self._trained = self._trained, self._names_trained()
        self._once_trained |= before
        if self._pending:  # the optimizers step these once more
            self._frozen_since |= before - self._trained
        self._renew()
        return self._names() - known

    def _renew(self) -> None:
        if isinstance(self._sync, ShardedStages):
            self._sync.refresh(*self._summed(), self._frozen_since)
        else:
            self._sync = self._made()

    def _sum(self, names: set[str]) -> None:
        parameters, holders = self._summed()
        mine = {name: parameter for name, parameter in parameters.items() if name in names}
        GradientSync(mine, {name: holders[name] for name in holders if name in names}, self.control.mesh).sync()

    def _names(self) -> set[str]:
        return {name for index in self._indices for name in index.names}

    def _current_facts(self) -> tuple[object, ...]:
        groups = (tuple(map(id, index.optimizer.param_groups)) for index in self._indices)
        parameters = list(self.module.parameters())
        if self._cut:
            check_no_hooks(self.module, parameters)
        return trained_flags(parameters), *groups

    def _names_trained(self) -> set[str]:
        return {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def _made(self) -> GradientSync | ShardedStages:
        mesh, uses = self.control.mesh, self.layout.uses
        parameters, holders = self._summed()
        if self.sharding == "fsdp":
            return ShardedStages(self.module, parameters, holders, mesh, stages=uses, device=self._device)
        parted = () if self._parallel is None else self._parallel.cut
        since, device = self._frozen_since, self._device
        return GradientSync(parameters, holders, mesh, stages=uses, parted=parted, frozen_since=since, device=device)

    def _summed(self) -> tuple[dict[str, Parameter], dict[str, list[int]]]:
        """This rank's parameters, and the holders of all, in the order of registration.

        They include those of the optimizers, and parameters that can be sharded although nobody trains them.
        """
        wanted = self._names()
        named = dict(self.module.named_parameters())
        if self.sharding == "fsdp":
            wanted |= {name for name, parameter in named.items() if not parameter.requires_grad}
        here = self.layout.names_on(self.control.device)
        parameters = {name: parameter for name, parameter in named.items() if name in wanted & here}
        return parameters, {name: self.layout.ranks(name, self.control) for name in named if name in wanted}

    def _stepped(self) -> dict[str, Tensor]:
        parts = self._sync.stepped if isinstance(self._sync, ShardedStages) else {}
        return {**tensors_of(self.module), **parts}

    def _stepped_here(self) -> set[str]:
        return self._owned.owned if self._owned is not None else self.layout.names_on(self.control.device)

    def _with_owners(self) -> OwnedParameters:
        named = dict(self.module.named_parameters())
        holders = {name: self.layout.ranks(name, self.control) for name in named}
        with self._shown():  # undivided sizes are the same on all ranks
            owners = assign_owners(dict(self.module.named_parameters()), holders)
        here = self.layout.names_on(self.control.device)
        mine = {name: parameter for name, parameter in named.items() if name in here}
        return OwnedParameters(mine, holders, owners, self.control.mesh)


def check_no_hooks(module: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Raise ConfigError if parameters of the module have hooks on their gradients; quick, for a look in every step.

    Autograd would give a hook the part of each micro-batch, before parts are summed over ranks.
    """
    hooked = set(map(id, with_gradient_hooks(parameters)))
    if not hooked:
        return
    names = [name for name, parameter in module.named_parameters() if id(parameter) in hooked]
    raise ConfigError(
        f"The parameters {some(names, most=3)} have hooks on their gradients (register_hook, "
        "register_post_accumulate_grad_hook), which would get those of micro-batches. Change gradients in the hook "
        "on_before_optimizer_step of the module or of a callback, where they are those of mini-batches, on every rank: "
        "`for p in self.parameters(): p.grad is None or p.grad.clamp_(-1, 1)`."
    )


def check_elementwise(optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigError for optimizers that may need an unsharded parameter to step a shard of it."""
    for optimizer in optimizers:
        if type(optimizer) not in ELEMENTWISE:
            known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ConfigError(
                f"configure_optimizers returned {type(optimizer).__name__}, and strategy.sharding=fsdp lets each "
                "replica step a part of every parameter, which is right for optimizers that treat elements one by "
                f"one: {known}. Use strategy.sharding=zero1, which steps undivided parameters."
            )


def idle_sharding(plan: Plan, num_pipelines: int) -> str:
    """A note if the plan's sharding has nothing to split; otherwise empty."""
    if plan.sharding == "none" or num_pipelines * max(len(stage.devices) for stage in plan.stages) > 1:
        return ""
    return (
        f"strategy.sharding={plan.sharding} has nothing to split: every stage is on one process. It is for stages on "
        "several devices, or strategy.num_pipelines > 1."
    )
