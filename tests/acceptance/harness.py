"""Runs the zoo: many models, one after the other, in the same processes with one process group.

Each model is trained for one mini-batch in the planner's stages, and for the same mini-batch in one process. A failure
may leave the processes out of step; then the next models get new ones.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp.capture import batch_size_of, slice_batch
from lightning_gpp.capture.batch import GUESSED, BatchDims
from lightning_gpp.errors import GPPError
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.host import Host, Job
from lightning_gpp.training.measured.machine import footprint_of
from lightning_gpp.training.options import Options
from lightning_gpp.training.setup import set_up
from lightning_gpp.training.tensors.joining import join
from tests import distributed
from tests.acceptance.models import zoo
from tests.distributed import run_distributed

distributed.preload("tests.acceptance.harness")

TOLERANCE: Final = 1e-12
ROUNDING: Final = 1e-6
"""Relative difference that code with parts in float32 has between a batch and its halves, and losses in float32."""
SCREEN: Final = 2000
"""Characters of a message that fits a screen."""
PATIENCE: Final = 180.0
"""Seconds for one model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a model.

    Attributes:
        kind: "passed", "micro-batches" (equal to one process over the same micro-batches, and warned of it if more than
            rounding explains the difference), "rounding" (equal but for the rounding of code in float32 inside of a
            model in float64, in a stage whose replicas compute fewer samples at once), "draws" (other random
            numbers than one process, which a message says), "refused", "wrong", "crashed" or "missing" (a library).
        message: the refusal, or the error.
        error: largest relative difference of loss and gradients from those of one process over the same micro-batches.
        undivided: the same from those of one process over the undivided mini-batch.
        stages: modules of the stages.
    """

    name: str
    kind: str
    message: str = ""
    error: float = 0.0
    undivided: float = 0.0
    stages: tuple[tuple[str, ...], ...] = ()


def run_zoo(world_size: int, names: Sequence[str], max_replicas: int | None = 1) -> list[Outcome]:
    """Run models of the zoo in `world_size` processes."""
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        while rest := [name for name in names if name not in outcomes]:
            try:
                run_distributed(world_size, _work, folder, rest, max_replicas, timeout=PATIENCE * (1 + len(rest)))
            except AssertionError as error:
                done = [_worst(found) for name in rest if (found := _reports(Path(folder), name, world_size))]
                outcomes |= {outcome.name: outcome for outcome in done}
                if done and done[-1].kind in ("refused", "crashed"):
                    continue  # this one left the processes out of step
                broken = next(name for name in rest if name not in outcomes)
                known = list(_known(Path(folder), broken, world_size))
                outcomes[broken] = (
                    known[0] if known else Outcome(name=broken, kind="crashed", message=str(error)[-SCREEN:])
                )
            for name in rest:
                if reports := _reports(Path(folder), name, world_size):
                    outcomes[name] = _worst(reports)
    return [outcomes[name] for name in names]


_ORDER: Final = ("crashed", "wrong", "refused", "missing", "left alone", "draws", "rounding", "micro-batches", "passed")


def _worst(reports: Sequence[Outcome]) -> Outcome:
    return min(reports, key=lambda report: (_ORDER.index(report.kind), -report.error))


def _known(folder: Path, name: str, world_size: int) -> Iterator[Outcome]:
    for rank in range(world_size):
        file = folder / f"{name}.{rank}"
        if file.exists():
            yield Outcome(**json.loads(file.read_text()))


def _reports(folder: Path, name: str, world_size: int) -> list[Outcome]:
    """The reports of all ranks; none if one lacks."""
    found = list(_known(folder, name, world_size))
    return found if len(found) == world_size else []


def _work(rank: int, folder: str, names: Sequence[str], max_replicas: int | None) -> None:
    """Run models on one rank, and leave a report of each."""
    faulthandler.cancel_dump_traceback_later()
    entries = zoo()
    _warm_up()
    for name in names:
        with open(f"{folder}/stacks{rank}", "w") as stacks:
            faulthandler.dump_traceback_later(PATIENCE, exit=True, file=stacks)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                outcome = _attempt(name, entries[name], max_replicas, caught)
            faulthandler.cancel_dump_traceback_later()
        _leave(Path(folder), outcome, rank)


def _warm_up() -> None:
    """Import what the first backward imports."""
    torch.ones(1, requires_grad=True).sum().backward()


def _leave(folder: Path, outcome: Outcome, rank: int) -> None:
    file = folder / f"{outcome.name}.{rank}"
    file.with_suffix(f".new{rank}").write_text(json.dumps(asdict(outcome)))
    file.with_suffix(f".new{rank}").rename(file)
    if outcome.kind == "left alone":
        os._exit(1)
    if outcome.kind not in ("refused", "crashed"):
        return
    deadline = time.monotonic() + 3.0
    while not _reports(folder, outcome.name, dist.get_world_size()):
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.01)
    if any(report.kind == "left alone" for report in _reports(folder, outcome.name, dist.get_world_size())):
        os._exit(1)


def _attempt(name: str, entry: Any, max_replicas: int | None, caught: list[warnings.WarningMessage]) -> Outcome:
    try:
        torch.manual_seed(0)
        module, batch, *given = entry()
    except ImportError as error:
        return Outcome(name=name, kind="missing", message=str(error))
    module = without_dropout(module.double().train())
    chosen = given[0] if given else {}
    options = Options(num_micro_batches=2, max_replicas=max_replicas, search_seconds=0.5, **chosen)
    try:
        return _compared(name, module, batch, options, caught)
    except GPPError as error:
        return Outcome(name=name, kind="refused", message=f"{type(error).__name__}: {error}")
    except Exception:
        trace = traceback.format_exc()
        kind = "left alone" if "Connection closed" in trace or "Connection reset" in trace else "crashed"
        return Outcome(name=name, kind=kind, message=trace)


def without_dropout(module: nn.Module) -> nn.Module:
    """Draws differ between one process and several."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return module


_UNLIKE: Final = "is not training on one device"
_DRAWS: Final = "draws random numbers that mix its samples"


def _told(sign: str, caught: Sequence[warnings.WarningMessage]) -> bool:
    """True if rank 0 was told something."""
    found = [any(sign in str(warning.message) for warning in caught)]
    dist.broadcast_object_list(found, 0)
    return found[0]


def _largest(value: float) -> float:
    """The largest of the values of all ranks."""
    found = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return max(found)


class _Telling(Host):
    """Keeps messages among the warnings."""

    def inform(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)


def _compared(
    name: str,
    module: nn.Module,
    batch: Any,
    options: Options,
    caught: list[warnings.WarningMessage],
) -> Outcome:
    alone = copy.deepcopy(module)
    single = copy.deepcopy(module).training_step(batch)
    single.backward()  # what fails in one process, too, is a mistake of the zoo
    tolerance = ROUNDING if single.dtype == torch.float32 else TOLERANCE
    engine = _engine(module, batch, options)
    dims = options.batch_dims or GUESSED
    size = engine.plan.stages[engine.plan.step_stage].micro_batch_size
    loss = float(engine.train_step(batch))
    found = {n: p.grad for n, p in module.named_parameters() if not p.is_meta}
    here = _difference(copy.deepcopy(alone), batch, dims, [(0, batch_size_of(batch, dims))], loss, found)
    undivided = error = _largest(here)  # a rank without parameters only knows the loss
    kind, message = "passed", ""
    warned, draws = (_told(sign, caught) for sign in (_UNLIKE, _DRAWS))
    if undivided > tolerance:
        kind, error = "micro-batches", _difference(alone, batch, dims, _parts(batch, dims, size), loss, found)
        if error > tolerance or not (warned or undivided < ROUNDING):
            kind = "draws" if draws else "rounding" if error < ROUNDING and _rounds(engine) else "wrong"
            message = f"{undivided:.3g} from one process, {'as a message tells' if draws else 'without a warning'}"
    elif warned:
        kind, message = "wrong", "warned of a difference from one process that is none"
    stages = tuple(stage.modules for stage in engine.plan.stages)
    return Outcome(name=name, kind=kind, message=message, error=error, undivided=undivided, stages=stages)


def _rounds(engine: Any) -> bool:
    """True if a stage has replicas, and gradients pass through float32."""
    specs = (spec for operator in engine.graph for spec in operator.outputs)
    replicated = any(len(stage.devices) > 1 for stage in engine.plan.stages)
    return replicated and any(spec.requires_grad and spec.dtype == "float32" for spec in specs)


def _engine(module: nn.Module, batch: Any, options: Options) -> Any:
    control = join(options, dist.get_rank(), dist.get_world_size())
    job = Job(module=module, control=control, options=options, device=torch.device("cpu"), seed=1, host=_Telling())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return set_up(
        job,
        Incoming(module, control, options.batch_dims),
        batch,
        optimizers=[optimizer],
        footprint=footprint_of([optimizer], "32-true"),
    )


def _parts(batch: Any, dims: BatchDims, size: int) -> list[tuple[int, int]]:
    total = batch_size_of(batch, dims)
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def _difference(
    alone: nn.Module,
    batch: Any,
    dims: BatchDims,
    parts: Sequence[tuple[int, int]],
    loss: float,
    found: dict[str, Tensor | None],
) -> float:
    """The largest relative difference of loss and gradients from those of one process over parts of the mini-batch."""
    total, expected = batch_size_of(batch, dims), 0.0
    for start, stop in parts:
        part = batch if len(parts) == 1 else slice_batch(batch, start, stop, total, dims)
        result = alone.training_step(part) * ((stop - start) / total)
        result.backward()
        expected += float(result)
    wanted = {n: _dense(p) for n, p in alone.named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in wanted.values() if gradient.numel())
    differences = [abs(loss - expected) / max(abs(expected), 1e-300)]
    for name, gradient in found.items():
        here = torch.zeros_like(wanted[name]) if gradient is None else _plain(gradient)
        floor = max(float(wanted[name].abs().max()) if wanted[name].numel() else 0.0, 1e-3 * scale, 1e-300)
        differences.append(float((here - wanted[name]).abs().max()) / floor if here.numel() else 0.0)
    return max(float("inf") if value != value else value for value in differences)


def _dense(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else _plain(parameter.grad)


def _plain(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
