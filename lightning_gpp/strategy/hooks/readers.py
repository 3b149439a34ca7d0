"""The hooks that read mini-batches, results of steps and metrics, which are on the rank that runs the step.

In training, validation and test every rank gets what they read, since hooks run on all of them. Predictions stay where
they are, as for writers: callbacks that read them run their hooks of prediction only there, so that nothing is written
twice. The loss of a training step is everywhere.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.hook_code import names_in_hook
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.hooks.found import ACTING, names_in, owners_of, user_hooks
from lightning_gpp.training.control import Control
from lightning_gpp.training.planner import TRAINING
from lightning_gpp.user_code import user_function

BATCH: Final = "batch"
RESULT: Final = "result"
METRICS: Final = "metrics"

_LOOPS: Final = {TRAINING: "train", "validation_step": "validation", "test_step": "test"}
_PLACES: Final = {"start": {BATCH: 0}, "end": {RESULT: 0, BATCH: 1}}
"""The positions of arguments of hooks at the start and end of a mini-batch."""

_ASKS: Final = {"is_global_zero", "global_rank", "local_rank", "rank_zero_only", "get_rank"}
"""Names in a hook, or in what decorates it, that decides itself on which ranks it reads."""

_PREDICTION: Final = tuple(f"on_predict_{each}" for each in ("batch_start", "batch_end", "epoch_end", "end"))


class _SentTensor:
    """The values of a tensor, on the CPU, and whether it was there."""

    def __init__(self, tensor: Tensor) -> None:
        self.values, self.on_cpu = tensor.detach().cpu(), tensor.device.type == "cpu"


class BatchReaders:
    """Gives all ranks of a pipeline the mini-batches and results that hooks read.

    Args:
        trainer: of the run.
        control: the side channel of this rank.
        device: the device of this rank.

    Attributes:
        read: what hooks around each step read: the mini-batch (`BATCH`), the result (`RESULT`), values of metrics that
            the step updates (`METRICS`).
    """

    def __init__(self, trainer: pl.Trainer, control: Control, device: torch.device) -> None:
        self._trainer, self._control, self._device = trainer, control, device
        self.read: dict[str, set[str]] = {}
        self._silenced = Replaced()

    def attach(self) -> None:
        """Agree on what is read; silence hooks of prediction where there are no predictions. All ranks call this."""
        *callbacks, module = owners_of(self._trainer)
        found = {
            step: {*_arguments_read([*callbacks, module], loop), *self._metrics_read(loop)}
            for step, loop in _LOOPS.items()
        }
        self.read = self._control.broadcast(found)
        if not self._control.loads:
            for callback in callbacks:
                if isinstance(callback, BasePredictionWriter) or RESULT in _arguments_read([callback], "predict"):
                    self._silence(callback)

    def detach(self) -> None:
        """Undo `attach`."""
        self.read = {}
        self._silenced.restore()

    def _metrics_read(self, loop: str) -> set[str]:
        names = [f"on_{loop}_batch_{moment}" for moment in _PLACES] + (list(ACTING) if loop == "train" else [])
        hooks = user_hooks(self._trainer, names)
        return {METRICS} if any("compute" in names_in(hook, self._trainer) for hook in hooks) else set()

    def everywhere(self, value: Any) -> Any:
        """A value of the rank that runs the step, which waits for nobody, on all ranks of its pipeline."""
        mine = self._control.runs_step
        shared = self._control.share_object(pytree.tree_map_only(Tensor, _SentTensor, value) if mine else None)
        return value if mine else pytree.tree_map_only(_SentTensor, self._received, shared)

    def _received(self, sent: _SentTensor) -> Tensor:
        return sent.values if sent.on_cpu else sent.values.to(self._device)

    def _silence(self, callback: object) -> None:
        names = ("write_on_batch_end", "write_on_epoch_end") if isinstance(callback, BasePredictionWriter) else ()
        for name in names or _PREDICTION:
            self._silenced.put(callback, name, _silent(getattr(callback, name)))


def _silent(hook: Any) -> Any:
    """Replaces a hook on ranks without predictions, where it would fail, or overwrite what others write.

    It is still taken for the hook itself: all ranks take part in what surrounds it.
    """

    @functools.wraps(getattr(hook, "__func__", hook))
    def nothing(*_: Any, **__: Any) -> None:
        pass

    return nothing


def _arguments_read(owners: Sequence[object], loop: str) -> Iterator[str]:
    for owner in owners:
        before = 2 if isinstance(owner, pl.Callback) else 0  # the trainer and the module
        for moment, places in _PLACES.items():
            hook = getattr(owner, f"on_{loop}_batch_{moment}")
            function = user_function(hook)
            if function is not None and not _asks(hook, function, owner):
                code, first = function.__code__, before + isinstance(hook, MethodType)
                known = {RESULT: "loss"} if loop == "train" else {}
                yield from (name for name, place in places.items() if _reads(code, place + first, known.get(name, "")))


def _asks(hook: Any, function: FunctionType, owner: object) -> bool:
    """True if a hook, or what decorates it, decides by the rank."""
    while hasattr(hook, "__wrapped__"):
        if _ASKS.intersection(hook.__code__.co_names):
            return True
        hook = hook.__wrapped__
    return bool(_ASKS & names_in_hook(function, [owner]))


def _reads(code: CodeType, place: int, known: str = "") -> bool:
    """True if a function uses its argument at this position, or all of its arguments; of a dictionary more than the
    entry that is `known` everywhere.
    """
    positional = code.co_argcount
    if place >= positional and not code.co_flags & inspect.CO_VARARGS:
        return False
    name = code.co_varnames[place if place < positional else positional + code.co_kwonlyargcount]
    found = [*dis.get_instructions(code), None, None]
    loads = (at for at, each in enumerate(found) if each and "LOAD" in each.opname and _mentions(each.argval, name))
    return any(not (known and _is_entry(found[at + 1], found[at + 2], known)) for at in loads)


def _is_entry(key: dis.Instruction | None, access: dis.Instruction | None, name: str) -> bool:
    """True for the instructions after a dictionary that read one entry: `["loss"]`."""
    if key is None or access is None:
        return False
    reads = access.opname == "BINARY_SUBSCR" or (access.opname == "BINARY_OP" and access.argrepr == "[]")
    return key.opname == "LOAD_CONST" and key.argval == name and reads


def _mentions(argument: Any, name: str) -> bool:
    return argument == name or (isinstance(argument, tuple) and name in argument)
