"""The processes of a run: their process group, failure monitor and end."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from abc import abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # it has no types

from lightning_gpp._compat.lightning_processes import ScriptLauncher
from lightning_gpp.errors import ConfigError
from lightning_gpp.failure.hangs import Activity, Wait
from lightning_gpp.failure.limits import Limits
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.runtime.mesh import open_queues
from lightning_gpp.strategy.meeting import meeting_point
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.loaders import tell_of_pipelines
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.options import Options
from lightning_gpp.training.tensors.joining import join, pipelines_of

_GRACE: Final = 5.0
"""Seconds for the processes that this one has started to end by themselves."""
_NO_SCRIPT: Final = (
    "devices={devices} starts {more} more processes, each of which runs your script from its beginning, but there is "
    "none: this is a notebook, an interactive shell or `python -c`. Save the code in a file, and start that."
)
_NO_GUARD: Final = (
    "A worker of a data loader (multiprocessing_context='spawn') has come to the Trainer, because it runs your script "
    "from its beginning. Put what the script does under `if __name__ == '__main__':`."
)


def has_script() -> bool:
    """True if there is a script that further processes could run; not in notebooks, shells and `python -c`."""
    return not hasattr(sys, "ps1") and Path(sys.argv[0]).is_file()


def start_process_group(
    environment: ClusterEnvironment,
    backend: str | None,
    device: torch.device,
    timeout: timedelta,
    store: Store | None,
) -> None:
    """Initialise torch.distributed if necessary; it is destroyed when the interpreter exits.

    Code of users may read the environment variables that other strategies of Lightning set.
    """
    if store is None:
        return
    parts = [part.rpartition(":")[2] for part in (backend or "").split(",") if part]
    if unknown := [part for part in parts if not dist.is_backend_available(part)]:
        known = [name for name in dist.Backend.backend_type_map if dist.is_backend_available(name) and name != "fake"]
        raise ConfigError(
            f"strategy.process_group_backend is {backend!r}, and this installation of torch has no {unknown[0]!r}. Use "
            f"one of: {', '.join(known)}."
        )
    os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
    store.set_timeout(timeout)
    dist.init_process_group(
        backend or dist.get_default_backend_for_device(device),
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
        store=store,
    )
    atexit.register(leave)


def leave() -> None:
    """Destroy the process group, if there is one: Lightning does so only for NCCL."""
    if dist.is_initialized():
        dist.destroy_process_group()


def given_seed() -> int | None:
    """The seed of Lightning's `seed_everything`, if it was called."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(seed) if seed else None


class JobProcesses:
    """Processes, their watch, and collectives of pipelines, for the strategies of the trainer and of Fabric."""

    _owner: ClassVar = "Trainer"
    """The class that has the arguments `accelerator` and `devices`."""

    options: Options
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    local_rank: int
    node_rank: int
    global_rank: int
    _launcher: Any
    _num_nodes: int
    _control: Control | None
    _told_world_size = _told_gather = False
    _phase: tuple[str, str] | None = None
    """The activity of this rank between two actions, for messages, and the place in the steps where it began."""

    @property
    @abstractmethod
    def engine(self) -> Engine | None: ...

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        if not self.parallel_devices:
            raise ConfigError(
                f"The strategy has no devices yet; it gets them from {self._owner}(accelerator=, devices=)."
            )
        if self.local_rank >= self.num_processes:
            raise ConfigError(
                f"The launcher has started at least {self.local_rank + 1} processes on this machine, but "
                f"{self._owner}(devices=...) has {self.num_processes}. Give it as many devices as processes."
            )
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of machines of the job; set by Lightning."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def world_size(self) -> int:
        """Number of processes; code of users that reads it is told once that pipelines divide data."""
        if self._control is not None and not self._told_world_size:
            self._told_world_size = tell_of_pipelines(self._control.mesh)
        return 1 if self.cluster_environment is None else self.cluster_environment.world_size()

    @property
    def num_pipelines(self) -> int:
        """Number of pipeline replicas."""
        return pipelines_of(self.options, self.num_nodes * self.num_processes)

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if self.parallel_devices and self.parallel_devices[0].type == "cuda":
            open_queues()
        if self.num_processes * self.num_nodes == 1:  # notebooks, too, run one process
            return
        assert environment is not None  # Lightning's connector has set it
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # while it imports the script
            raise ConfigError(_NO_GUARD)
        if not environment.creates_processes_externally and not has_script():
            raise ConfigError(_NO_SCRIPT.format(devices=self.num_processes, more=self.num_processes - 1))
        self._launcher = ScriptLauncher(environment, self.num_processes, self.num_nodes)

    def _end_started(self) -> None:
        if isinstance(self._launcher, ScriptLauncher):
            self._launcher.end(_GRACE)

    def set_world_ranks(self) -> None:
        """Tell the environment and Lightning's rank-zero functions which rank this is."""
        environment = self.cluster_environment
        if environment is not None:
            node = self.node_rank if self.num_nodes > 1 else 0
            environment.set_global_rank(node * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # of a function

    def _monitored(self) -> FailureMonitor:
        return FailureMonitor(
            rank=self.global_rank,
            world_size=self.world_size,
            limits=Limits.within(self.options.failure_timeout, self.options.timeout),
            activity=Activity(describe=self._describe, wait=self._wait),
            before_exit=self._end_started,
        )

    def _meet(self, environment: ClusterEnvironment, monitor: FailureMonitor) -> Control:
        """Start the watch, then what would wait for a rank that has ended: process group and mesh."""
        options = self.options
        store = meeting_point(environment, timedelta(seconds=monitor.limits.patience))
        monitor.start(store)
        start_process_group(environment, options.process_group_backend, self.root_device, options.timeout, store)
        self._control = join(options, self.global_rank, self.world_size)
        return self._control

    def _begin(self, phase: str) -> None:
        """Let messages say that this rank is in a phase, until `_end_phase`, or until it goes on with its steps."""
        self._phase = phase, self._place()

    def _end_phase(self) -> None:
        self._phase = None

    def _describe(self) -> str:
        phase, place = self._phase, self._place()
        return phase[0] if phase is not None and phase[1] == place else place

    def _place(self) -> str:
        return "set-up" if self.engine is None else self.engine.describe()

    def _wait(self) -> Wait | None:
        if self.engine is not None:
            return self.engine.wait()
        return None if self._control is None else self._control.wait

    def _with_others(self) -> Control | None:
        """The way to the other ranks, if they would answer."""
        return self._control

    @property
    def _peers(self) -> dist.ProcessGroup | None:
        """In the user's step, the same device of all pipelines: which ranks of a pipeline run it does not matter."""
        return None if self._control is None else self._control.mesh.stand_in

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; in the user's step, for the other pipelines."""
        peers = self._peers
        if peers is None and (control := self._with_others()) is not None:
            control.barrier()
        elif peers is not None and peers.size() > 1:
            dist.barrier(group=peers)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast `obj` from rank `src`; in the user's step, from a pipeline."""
        peers, values = self._peers, [obj]
        if peers is None:
            control = self._with_others()
            return obj if control is None else control.broadcast(obj, src)
        if peers.size() > 1:
            dist.broadcast_object_list(values, group_src=src, group=peers)
        return values[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks (or any rank) decided yes; in the user's step, all pipelines."""
        peers = self._peers
        if peers is None:
            control = self._with_others()
            return decision if control is None else control.unanimous(decision, everyone=all)
        decisions = [decision] * peers.size()
        if peers.size() > 1:
            dist.all_gather_object(decisions, decision, group=peers)
        return min(decisions) if all else max(decisions)

    def _over_pipelines(self) -> dist.ProcessGroup | None:
        """The group of the pipelines, of which a check runs one alone; None if there is one."""
        group = None if self._control is None else self._peers or self._control.mesh.replica_group
        return None if group is None or group.size() == 1 else group

    def _tell_of_gathers(self) -> None:
        """Tell users once that code for ranks of DDP gets no dimension of ranks here."""
        if self._control is not None and self._control.num_processes > 1 and not self._told_gather:
            self._told_gather = True
            self._control.warn(
                f"all_gather returned its tensor as it is, without a dimension of ranks: the "
                f"{self._control.num_processes} processes are one pipeline, whose step has all samples of its "
                "mini-batch. Leave it out; strategy.step=whole is for losses that compare samples."
            )

    def _reduced(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce over the pipelines: stages of one pipeline hold parts of one computation, not copies of it."""
        pipelines = self._over_pipelines()
        if pipelines is None or not isinstance(tensor, Tensor):
            return tensor
        return _reduce_over(tensor, group or pipelines, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all pipelines; with one pipeline, return the tensor itself."""
        pipelines = self._over_pipelines()
        if pipelines is None:
            self._tell_of_gathers()
            return tensor
        everyone = group is None or group is dist.group.WORLD
        gathered: Tensor = super().all_gather(tensor, pipelines if everyone else group, sync_grads)  # type: ignore[misc]
        return gathered


def _reduce_over(tensor: Tensor, group: dist.ProcessGroup, operation: str | dist.ReduceOp | None) -> Tensor:
    """Reduce in place: `mean` or `avg`, `sum` (None) or another operation of torch.distributed, by name or itself."""
    if isinstance(operation, str) and operation.lower() in ("mean", "avg"):
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group)  # gloo has no mean
        return tensor.copy_(tensor / dist.get_world_size(group))
    if isinstance(operation, str):
        operation = getattr(dist.ReduceOp, operation.upper())
    dist.all_reduce(tensor, dist.ReduceOp.SUM if operation is None else operation, group)
    return tensor
