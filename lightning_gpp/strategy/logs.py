"""Logging from one rank for all: `self.log` calls of the step are recorded, combined and replayed on every rank.

With several micro-batches the step logs several times; combined into one value per mini-batch, Lightning sees the same
calls as on one device. Every rank makes these calls, so that callbacks that read metrics take the same decisions
everywhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gpp._compat.lightning import FORWARD_CACHE
from lightning_gpp.errors import ConfigError
from lightning_gpp.training.checks.results import REDUCTIONS
from lightning_gpp.training.control import Control
from lightning_gpp.training.options import Context

_SIGNATURE = inspect.signature(pl.LightningModule.log)


@dataclass(frozen=True, slots=True)
class Call:
    """A `self.log` call without its value, which must be equal on all ranks. `metric`: path of a torchmetrics object.

    `dtype` is the value's, None for plain numbers. `occurrence` counts calls with the same name in one run of the step.
    """

    name: str
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype | None
    metric: str | None
    has_value: bool
    occurrence: int

    @property
    def reduction(self) -> str:
        """The reduction of micro-batches' values that corresponds to `reduce_fx` for batches."""
        given = dict(self.kwargs).get("reduce_fx", "mean")
        name = given if isinstance(given, str) else getattr(given, "__name__", "mean")
        return {"avg": "mean"}.get(name.lower(), name.lower())

    @property
    def is_shared_mean(self) -> bool:
        """True for a mean, of which ranks with other data get the mean over all."""
        return self.reduction == "mean" and self.metric is None and bool(dict(self.kwargs).get("sync_dist"))


@dataclass(slots=True)
class Values:
    """The values that one call logged in the runs of the step, with the number of samples of each.

    `shares`: what the samples count for in means. `sizes` are those that the call gave by `batch_size`, otherwise the
    samples. `counted`: the sizes of other
    mini-batches have shown that they are counts of what a micro-batch has; `constant`: that they are not.
    """

    values: list[Tensor] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    counted: bool = False
    constant: bool = False

    def add(self, value: Tensor, samples: int, share: float, size: int | None) -> None:
        self.values.append(value)
        self.samples.append(samples)
        self.shares.append(share)
        self.sizes.append(samples if size is None else size)

    def combined(self, reduction: str) -> tuple[Tensor, int]:
        """The value of the mini-batch, and its weight in the epoch.

        Sizes that grow with the micro-batch, such as numbers of tokens, add up.
        """
        entries = [*zip(self.values, self.sizes if self.are_items else self.shares, strict=True)]
        if reduction not in ("sum", "min", "max"):  # a mean over nothing is NaN, and has no weight
            entries = [entry for entry in entries if entry[1]] or entries
        values = torch.stack([value.detach().to(torch.float64).reshape(()) for value, _ in entries])
        weighed = torch.tensor([weight for _, weight in entries], dtype=torch.float64)
        weighed = weighed.to(values.device, non_blocking=True)
        return _combine(values, weighed, reduction), self.sizes[0] if self.is_of_mini_batch else sum(self.sizes)

    @property
    def are_items(self) -> bool:
        """True if the call says of how many items each value is the mean."""
        return not self.is_of_mini_batch and self.sizes != self.samples

    @property
    def are_counts(self) -> bool:
        """True if the call gives other sizes for micro-batches of as many samples: numbers of tokens, or of labels."""
        return len(set(zip(self.samples, self.sizes, strict=True))) > len(set(self.samples))

    @property
    def is_of_mini_batch(self) -> bool:
        """True for a size that is no count of what a micro-batch has: `batch_size=1`, or the size of the mini-batch."""
        size, *others = set(self.sizes)
        differ = len(set(self.samples)) > 1
        constant = differ or size < self.samples[0] or size == sum(self.samples) > self.samples[0]
        return not others and (constant or self.constant) and not self.counted


def _combine(values: Tensor, weights: Tensor, reduction: str) -> Tensor:
    if reduction == "sum":
        return values.sum()
    if reduction in ("min", "max"):
        return values.min() if reduction == "min" else values.max()
    return (values * weights).sum() / weights.sum().clamp(min=1)


@dataclass(slots=True)
class Record:
    """The logs of runs of user code on a mini-batch, and the number of samples on which they ran.

    `entries`: what the mini-batch counts for beside those of other pipelines; None for its samples.
    """

    calls: dict[Call, Values] = field(default_factory=dict)
    samples: int = 0
    entries: float | None = None

    def add(self, run: Iterable[tuple[Call, Tensor, int | None]], num_samples: int, share: float) -> None:
        """Add a run on `num_samples` samples, and what they count for."""
        self.samples += num_samples
        for call, value, size in run:
            self.calls.setdefault(call, Values()).add(value, num_samples, share, size)

    def weight(self, values: Values) -> float:
        """The weight of a call's mean beside those of other pipelines."""
        if values.are_items or self.entries is None:
            return sum(values.sizes)
        return self.entries * sum(values.shares) / self.samples

    def means_of_some(self) -> list[str]:
        """Names of means that only some of the runs logged, and for which no number of items was given."""
        names = (
            call.name
            for call, values in self.calls.items()
            if call.reduction == "mean" and call.metric is None
            if values.sizes == values.samples and sum(values.samples) < self.samples
        )
        return [*dict.fromkeys(names)]


class LogRecorder:
    """Records a module's logs instead of logging them. A run of user code counts only if it ended normally.

    Attributes:
        record: that of the mini-batch whose turn it is.
        combined: how the values of micro-batches are combined, by name, if not as those of batches are.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.record = Record()
        self.combined: dict[str, str] = {}
        self._early: dict[int, Record] = {}
        self._counts = set[str]()
        self._constants = set[str]()
        self._metric_paths = {id(part): path for path, part in module.named_modules() if isinstance(part, Metric)}
        self._owners = [part for part in module.modules() if isinstance(part, pl.LightningModule)]
        self._run: list[tuple[Call, Tensor, int | None]] = []

    def reset(self) -> LogRecorder:
        """Forget all records."""
        self.record = Record()
        return self

    @property
    def calls(self) -> dict[Call, Values]:
        """The calls of the mini-batch whose turn it is."""
        return self.record.calls

    def reduction(self, call: Call) -> str:
        """The reduction of the micro-batches' values of a call."""
        known = call.reduction == "mean" or call.reduction in REDUCTIONS
        return self.combined.get(call.name, call.reduction) if known else call.reduction

    def turn(self, batch: int, entries: float | None = None) -> None:
        """Take up what was recorded for this mini-batch of training, some perhaps before its turn.

        `entries`: see `Record`.
        """
        self.record = self._early.pop(batch, Record())
        self.record.entries = entries
        self._counts |= {call.name for call, values in self.calls.items() if values.are_counts}
        self._constants |= {call.name for call, values in self.calls.items() if values.is_of_mini_batch}
        for call, values in self.calls.items():
            values.counted, values.constant = call.name in self._counts, call.name in self._constants

    def forget(self, batches: Iterable[int]) -> None:
        """Drop the records of mini-batches of training that were run before their turn."""
        for batch in batches:
            self._early.pop(batch, None)

    @contextmanager
    def run(
        self, num_samples: int, share: float | None = None, *, context: Context = nullcontext, batch: int | None = None
    ) -> Iterator[None]:
        """Record a run of user code on `num_samples` samples, inside `context`.

        `share`: what the samples count for in means, if not the same. `batch`: number of the mini-batch in training;
        None for the one whose turn it is.
        """
        self._run = []
        for owner in self._owners:
            vars(owner)["log"] = self._log
        try:
            with context():
                yield
        finally:
            for owner in self._owners:
                vars(owner).pop("log", None)
        record = self.record if batch is None else self._early.setdefault(batch, Record())
        record.add(self._run, num_samples, num_samples if share is None else share)

    def _log(self, *args: Any, **kwargs: Any) -> None:
        arguments = dict(_SIGNATURE.bind(self.module, *args, **kwargs).arguments)
        name, value = arguments.pop("name"), arguments.pop("value")
        del arguments["self"]
        size = arguments.pop("batch_size", None)
        metric = self._metric_path(name, value, arguments)
        current = getattr(value, FORWARD_CACHE) if isinstance(value, Metric) else value
        is_scalar = isinstance(current, Tensor) and current.numel() == 1
        scalar = self._scalar(name, current) if metric is None or is_scalar else None
        dtype = current.dtype if isinstance(current, Tensor) and current.is_floating_point() else None
        occurrence = sum(call.name == name for call, _, _ in self._run)
        call = Call(name, tuple(sorted(arguments.items())), dtype, metric, scalar is not None, occurrence)
        self._run.append((call, torch.zeros(()) if scalar is None else scalar, None if size is None else int(size)))

    def _metric_path(self, name: str, value: Any, arguments: dict[str, Any]) -> str | None:
        if not isinstance(value, Metric):
            return None
        path = arguments.get("metric_attribute") or self._metric_paths.get(id(value))
        if path is None:
            raise ConfigError(
                f"self.log({name!r}, ...) was given a {type(value).__name__} that is not an attribute of the module, "
                "so the other ranks have no such metric. Set it as an attribute in __init__."
            )
        return str(path)

    def _scalar(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor | Number):
            pl.LightningModule.log(self.module, name, value)  # raises with Lightning's explanation
        if not isinstance(value, Tensor):
            return torch.tensor(float(value), dtype=torch.float64)
        if value.numel() != 1:
            raise ConfigError(
                f"self.log({name!r}, ...) was given a tensor of shape {tuple(value.shape)}; a logged value is a single "
                "number. Log its mean, or several values under several names."
            )
        return value


Logged = tuple[Call, float, Any, float]
"""A call, its value, the number of samples that it counts for, and its weight beside those of other pipelines. The
number may have a fraction, if it is a mean, which `log` takes, whatever its annotation says.
"""


def exchange(
    control: Control, recorder: LogRecorder | None, facts: Any, results: Sequence[Tensor] = ()
) -> tuple[list[Logged], list[float], Any]:
    """The calls with their values, `results` as numbers, and picklable `facts`, all of the step's rank.

    The tensors are read once, all together, since reading waits for their device. `recorder`: of the step's rank.
    """
    mine = None if recorder is None else (*_values(recorder, results), facts)
    shared: tuple[list[Logged], list[float], Any] = control.share_object(mine)
    return shared


def over_pipelines(control: Control, calls: Sequence[Logged]) -> list[Logged]:
    """The calls; of means that are logged with `sync_dist` with the value over all pipelines, by weight. All ranks call
    it.
    """
    found = list(calls)
    means = [place for place, (call, *_) in enumerate(found) if call.is_shared_mean]
    sums = torch.zeros(len(means), 3, dtype=torch.float64)
    for row, place in zip(sums, means, strict=True):
        _, value, size, weight = found[place]
        row += torch.tensor([weight * value if weight else 0.0, weight, size], dtype=torch.float64)
    for place, (total, weight, size) in zip(means, control.sum(sums).tolist(), strict=True):
        found[place] = found[place][0], total / (weight or math.nan), size / control.num_pipelines, weight
    return found


def replay(module: pl.LightningModule, calls: Sequence[Logged], device: torch.device) -> None:
    """Call `module.log` as the step did, with the combined values."""
    for call, value, samples, _ in calls:
        # filling a tensor there waits for nothing, unlike a copy of the number
        logged: Any = torch.full((), value, dtype=call.dtype or torch.get_default_dtype(), device=device)
        if call.metric is not None:
            number, logged = logged, module.get_submodule(call.metric)
            setattr(logged, FORWARD_CACHE, number if call.has_value else None)
        type(module).log(module, call.name, logged, batch_size=samples, **dict(call.kwargs))  # here are values


def _values(recorder: LogRecorder, results: Sequence[Tensor]) -> tuple[list[Logged], list[float]]:
    """The calls with their combined values, and the results, in one transfer from their device."""
    pairs = [entry.combined(recorder.reduction(call)) for call, entry in recorder.calls.items()]
    numbers, count = _read([*results, *(value for value, _ in pairs)]), len(results)
    weights = map(recorder.record.weight, recorder.calls.values())
    calls = zip(recorder.calls, numbers[count:], (samples for _, samples in pairs), weights, strict=True)
    return list(calls), numbers[:count]


def _read(tensors: Sequence[Tensor]) -> list[float]:
    if not tensors:
        return []
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    same = [tensor.detach().reshape(()).to(device, torch.float64, non_blocking=True) for tensor in tensors]
    numbers: list[float] = torch.stack(same).tolist()
    return numbers
