"""The processes of a job come together: they agree on what all must have alike, and are divided into pipelines,
devices and their members, which are connected.

Ranks that disagree wait for each other until the timeout, or train on unnoticed. Digests are compared first; the facts
themselves are exchanged only if these differ, and the first difference is named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from importlib.metadata import distributions
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_gpp.errors import ConfigError
from lightning_gpp.planning import devices_per_pipeline
from lightning_gpp.runtime.mesh import Mesh
from lightning_gpp.training.control import Control
from lightning_gpp.training.options import Options
from lightning_gpp.training.planner import devices_wanted

SharedFacts = Mapping[str, str]
"""Values by the name under which users know them, such as the key of the configuration."""

_FROM_RANK_0: Final = ("example_batch", "seed")
"""Options whose value on rank 0 counts for all."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_LONGEST: Final = 200
"""Characters of a value in a message."""


def check_alike(facts: SharedFacts, group: dist.ProcessGroup | None = None) -> None:
    """Compare facts with those of all other ranks. All ranks of the group call this together.

    Args:
        facts: the facts of this rank.
        group: ranks to compare with; by default all.

    Raises:
        ConfigError: on all ranks, with the first difference, both values and the ranks that have them.
    """
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
    if len(set(_gathered(digest, group))) > 1:
        raise ConfigError(_difference(_gathered(dict(facts), group)))


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _difference(facts: Sequence[SharedFacts]) -> str:
    """A message about the first fact that is not the same in all of these."""
    names = dict.fromkeys(name for of_rank in facts for name in of_rank)
    name = next(name for name in names if len({of_rank.get(name) for of_rank in facts}) > 1)
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(facts):
        ranks.setdefault(of_rank.get(name, "missing"), []).append(rank)
    short = {value: value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..." for value in ranks}
    values = ", but ".join(f"{short[value]} on {_listed(having)}" for value, having in ranks.items())
    return (
        f"The ranks disagree on {name}: it is {values}. Ranks that do not work alike would wait for each other for "
        "ever. Start all with the same code, installation and configuration, and let nothing of it depend on the rank, "
        "the host or unseeded random choices."
    )


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{', ...' * (len(ranks) > 8)}"


def text_of(value: object) -> str:
    """A value as text that is the same in all processes."""
    return _ADDRESS.sub("", repr(value))


def facts_of_options(options: Options) -> dict[str, str]:
    """The options that ranks have to share, and the versions of what runs them."""
    named = {f"strategy.{field.name}": getattr(options, field.name) for field in fields(Options)}
    values = {name: text_of(value) for name, value in named.items() if name.split(".")[1] not in _FROM_RANK_0}
    installed = next((each.version for each in distributions(name="lightning-gpp")), "of a checkout")
    return {"the version of lightning-gpp": installed, "the version of torch": str(torch.__version__), **values}


def facts_of_tensors(module: nn.Module) -> dict[str, str]:
    """Shapes and types of a module's parameters, whether they are trained, and the classes of its parts."""
    named = ((name, each) for name, each in module.named_parameters() if not is_lazy(each))
    parts = {f"the module {path!r}": _described(part) for path, part in module.named_modules() if path}
    tensors = {
        f"parameter {name!r}": f"{list(each.shape)} {each.dtype}, {'trained' if each.requires_grad else 'frozen'}"
        for name, each in named
    }
    return tensors | parts


def _described(part: nn.Module) -> str:
    """The class of a module, with the settings of a layer of torch."""
    settings = part.extra_repr() if type(part).__module__.startswith("torch.nn.modules") else ""
    return f"{type(part).__name__}({settings})"


def facts_of_optimizers(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Kind, groups and hyperparameters of optimizers of the full module."""
    return dict(_facts_of_optimizers(list(optimizers)))


def _facts_of_optimizers(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, str]]:
    yield "the number of optimizers (configure_optimizers)", str(len(optimizers))
    for number, optimizer in enumerate(optimizers):
        yield f"the kind of optimizer {number}", type(optimizer).__name__
        yield f"the number of parameter groups of optimizer {number}", str(len(optimizer.param_groups))
        for place, group in enumerate(optimizer.param_groups):
            where = f"group {place} of optimizer {number}"
            yield f"the number of parameters in {where}", str(len(group["params"]))
            for name, value in sorted(group.items()):
                if name != "params":
                    known = value.tolist() if isinstance(value, Tensor) else value  # on a device of the rank's own
                    yield f"{name!r} in {where}", text_of(known)


_SCHEDULED: Final = ("lr", "momentum", "betas", "weight_decay")
"""The hyperparameters that schedules change."""


def facts_of_schedules(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """The hyperparameters that schedules have given to the groups of optimizers, which each rank computes itself."""
    facts = _facts_of_optimizers(list(optimizers))
    return {name: value for name, value in facts if name.startswith(tuple(f"{key!r} " for key in _SCHEDULED))}


def join(options: Options, rank: int, world_size: int) -> Control:
    """Divide the processes of a job into pipelines, and connect them. All of them call this together.

    Runs of one process share the connections, which last as long as the default process group: other code may
    communicate after a run, for example to save a checkpoint.

    Raises:
        ConfigError: the number of processes is not a multiple of those of a pipeline, or they have different options or
            versions.
    """
    if world_size > 1:
        check_alike(facts_of_options(options))
    num_pipelines = pipelines_of(options, world_size)
    devices = devices_per_pipeline(world_size // options.members, num_pipelines)
    for layout, control in list(_connected.items()):
        if control.mesh.everyone is not dist.group.WORLD:
            del _connected[layout]
    wanted = devices, options.members, num_pipelines, options.timeout
    if wanted not in _connected:
        mesh = Mesh(devices, num_pipelines, rank, members=options.members, timeout=options.timeout)
        _connected[wanted] = Control(mesh)
    return _connected[wanted]


def disconnect(control: Control) -> None:
    """Let later runs make new connections: in these, messages may be left of ranks that stopped at different points."""
    for layout, known in list(_connected.items()):
        if known is control:
            del _connected[layout]


_connected: Final[dict[tuple[int, int, int, timedelta], Control]] = {}
"""The connections of this process, by devices of a pipeline, their members, number of pipelines, and timeout."""


def pipelines_of(options: Options, world_size: int) -> int:
    """Number of pipeline replicas.

    Raises:
        ConfigError: the processes cannot be divided into devices.
    """
    num_devices, rest = divmod(world_size, options.members)
    if rest or not num_devices:
        raise ConfigError(
            f"strategy.tensor_parallel_size={options.members} does not divide the {world_size} processes of the job "
            "(trainer.devices x trainer.num_nodes). Start a multiple of it."
        )
    return options.num_pipelines or max(1, num_devices // devices_wanted(options, num_devices))
