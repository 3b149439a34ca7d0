"""The door to the tensors of other ranks: all ranks open it together, and inside each has all values.

    rank 0    holds head    with summon_full_params(self):    gets body, computes, gives it back
    rank 1    holds body    with summon_full_params(self):    gets head, computes, gives it back

Outside, what would need them is an error that names the door (`foreign`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.named_tensors import replaced_tensors, tensors_of, with_values
from lightning_gpp.training.control import Mirror
from lightning_gpp.training.host import Job
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.tensors.foreign import Foreign, alone
from lightning_gpp.training.tensors.parameters import Layout, digest
from lightning_gpp.wording import some


class Door:
    """Gives the ranks of a pipeline the values that others hold, for a while. All ranks call its methods together.

    Args:
        job: the job of the run.
        layout: who owns what.

    Attributes:
        locked: the reason why values cannot be gathered, and the way out; empty if they can.
    """

    def __init__(self, job: Job, layout: Layout) -> None:
        self.module, self._control, self._device = job.module, job.control, job.device
        self._mirror = Mirror(job.control, job.device)
        everywhere = set(range(job.control.num_devices))
        self._holders = {n: ranks for n, ranks in layout.devices.items() if not everywhere <= {*ranks}}
        self.locked = _reason(job, layout)
        self._gathered = set[str]()

    @contextmanager
    def open(self, part: nn.Module) -> Iterator[None]:
        """Inside, all ranks have the values of a part of the module, and draw the same random numbers.

        Raises:
            ConfigError: values cannot be gathered, in a step that only one rank runs, too; or only some ranks change a
                value.
        """
        if self.locked:
            raise ConfigError(f"summon_full_params gathers no values with {self.locked}")
        names = self._names_in(part) - self._gathered
        if alone.get():
            if names:
                raise ConfigError(
                    f"summon_full_params was called in a step, which one rank runs, for {some(sorted(names))}, which "
                    "others hold. Call it in a hook, which all ranks run."
                )
            yield
            return
        with self._mirror.one_stream(), self._values_of(names):
            before = self._digests(names)
            yield
            if self._holders:
                self._check_changes(before, self._digests(names))

    def _names_in(self, part: nn.Module) -> set[str]:
        inside = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
        return {name for name, tensor in self._tensors().items() if id(tensor) in inside}

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of which some rank lacks the values."""
        return {name: tensor for name, tensor in tensors_of(self.module).items() if name in self._holders}

    @contextmanager
    def _values_of(self, names: Collection[str]) -> Iterator[None]:
        lacking, tensors = list[tuple[Tensor, Tensor]](), self._tensors()
        for name in sorted(names):
            values = self._broadcast(tensors[name], self._holders[name][0])
            if isinstance(tensors[name], Foreign):
                lacking.append((tensors[name], _borrowed(tensors[name], values)))
        self._gathered.update(names)
        try:
            with replaced_tensors(self.module, lacking):
                yield
        finally:
            self._gathered.difference_update(names)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The values of a tensor on all ranks; `source` is the device that sends them."""
        if self._control.device == source:
            values = tensor.detach().contiguous()
        else:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        mesh = self._control.mesh
        group = mesh.pipeline_control_group if values.device.type == "cpu" else mesh.pipeline_group
        dist.broadcast(values, group_src=source, group=group)
        return values

    def _digests(self, names: Collection[str]) -> dict[str, str]:
        return {name: str(digest(tensor)) for name, tensor in self._tensors().items() if name in names}

    def _check_changes(self, before: dict[str, str], after: dict[str, str]) -> None:
        """Raise ConfigError for values that changed on a rank without those of their holder: they would be lost."""
        mine = {name for name in before if before[name] != after.get(name)}
        changed = self._control.gather_in_pipeline(mine)
        lost = {repr(name) for names in changed for name in names if name not in changed[self._holders[name][0]]}
        if lost:
            raise ConfigError(
                f"Inside of summon_full_params, {some(sorted(lost))} changed on some ranks, and not on the rank that "
                "keeps it. Let all ranks make the same change, not only those for which a condition such as "
                "trainer.is_global_zero holds."
            )


def _reason(job: Job, layout: Layout) -> str:
    """The option with which values cannot be gathered, and what serves instead; empty if they can."""
    if layout.plan.sharding == "fsdp":
        option = "strategy.sharding=fsdp. Use strategy.sharding=zero1"
    elif job.control.num_members > 1:
        option = "strategy.tensor_parallel_size. Leave it out"
    elif job.options.weights != SYNCHRONOUS:
        option = f"strategy.weights={job.options.weights}. Use strategy.weights={SYNCHRONOUS}"
    else:
        return ""
    return f"{option}, or save by trainer.save_checkpoint and read the file."


def _borrowed(foreign: Tensor, values: Tensor) -> Tensor:
    """A tensor with values in the place of a foreign one; its gradient stays where it is."""
    borrowed = with_values(foreign, values)
    if isinstance(borrowed, nn.Parameter):
        borrowed.grad = foreign.grad
    return borrowed


_DOORS: Final[WeakKeyDictionary[nn.Module, Door]] = WeakKeyDictionary()
"""The doors of the modules that are divided at present."""


def install(door: Door) -> None:
    """Let `summon_full_params` find this door, from now on."""
    _DOORS[door.module] = door


def remove(door: Door) -> None:
    """Undo `install`, unless another run has divided the module since."""
    if _DOORS.get(door.module) is door:
        del _DOORS[door.module]


@contextmanager
def summon_full_params(module: nn.Module) -> Iterator[None]:
    """Have all parameters and buffers of a module on every rank, in hooks; all ranks of the job call this together.

        def on_validation_epoch_end(self):
            with summon_full_params(self):
                images = self.generator(self.noise)

    Inside, the ranks draw the random numbers of the first one, so that all compute the same. A change that all ranks
    make stays. Gradients stay on the ranks that hold them. It takes the memory of the module on each rank. Where a
    module is not divided, as in one process or under another strategy, nothing happens.

    Args:
        module: the LightningModule, or a part of it that is enough.

    Raises:
        ConfigError: parameters are sharded, divided by tensor parallelism, or trained asynchronously; or only some
            ranks change a value.
    """
    door = next((door for root, door in _DOORS.items() if any(part is module for part in root.modules())), None)
    with nullcontext() if door is None else door.open(module):
        yield
