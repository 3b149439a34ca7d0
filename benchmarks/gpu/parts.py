"""The parts of the report that one library is enough for; each runs in the processes of a seating."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.towers import (
    TINY,
    Job,
    autocast,
    batch_of,
    gradients_of,
    medians,
    model_of,
    ordinary,
    pipeline,
    seconds_of,
    transformers,
    wait,
)
from lightning_gpp import Options
from lightning_gpp.capture import capture_step
from lightning_gpp.costs.model import CostModel
from lightning_gpp.training.measured.machine import measured_costs, resolved, simulated

STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """A kind of numbers to compute in, and the error that it may have against one process."""

    name: str
    dtype: torch.dtype
    tolerance: float
    mixed: bool = False


ARITHMETICS = (
    Arithmetic(name="float64", dtype=torch.float64, tolerance=1e-12),
    Arithmetic(name="float32, tf32 off", dtype=torch.float32, tolerance=1e-5),
    Arithmetic(name="bf16 autocast", dtype=torch.float32, tolerance=2e-2, mixed=True),
)


def correctness(device: torch.device, arithmetic: Arithmetic) -> tuple[float, float]:
    """Errors of the loss, relative, and of this rank's gradients, relative to the parameter's largest one.

    The reference is the undivided model on the same device, over the same micro-batches.
    """
    shape = replace(ordinary(device), width=256, samples=64)
    context: Callable[[], AbstractContextManager[Any]] = autocast(device) if arithmetic.mixed else nullcontext
    reference = model_of(shape, device, arithmetic.dtype)
    batch = batch_of(shape, device, arithmetic.dtype)
    expected = gradients_of(reference, batch, shape.micro_batches, context)
    precision = torch.bfloat16 if arithmetic.mixed else None
    with pipeline(device, shape, dtype=arithmetic.dtype, context=context, precision=precision) as job:
        loss = job.engine.train_step(job.batch)
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        held = {name: parameter.grad for name, parameter in job.model.named_parameters() if not parameter.is_meta}
        errors = [_relative(grad, wanted[name]) for name, grad in held.items()]
    return abs(float(loss) / float(expected) - 1), max(errors)


def _relative(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def predictions(device: torch.device) -> dict[str, list[float]]:
    """Predicted and measured seconds of a step, and peak bytes of every rank; from measured costs.

    Measured bytes are those of torch's allocator on GPUs, without the mini-batch on ranks that do not load one.
    """
    costs = costs_here(device) if dist.get_rank() == 0 else None
    with pipeline(device, transformers(device)) as job:
        engine = job.engine
        outcome: list[Any] = [None]
        if dist.get_rank() == 0:
            timeline = simulated(engine.plan, engine.graph, replace(engine.machine(), costs=costs))
            outcome = [(timeline.makespan, timeline.peak_bytes)]
        dist.broadcast_object_list(outcome)
        job.step()
        peak = _peak(job, device)
        measured = statistics.median(seconds_of(lambda: engine.train_step(job.batch), device) for _ in range(STEPS))
    makespan, peaks = outcome[0]
    return {"seconds": [makespan, measured], "bytes": [peaks[dist.get_rank()], peak]}


def _peak(job: Job, device: torch.device) -> float:
    """The most bytes in a step; not a number on CPUs, whose allocator does not count them."""
    if device.type == "cpu":
        return math.nan
    unused = () if job.engine.runs_step else job.batch
    torch.cuda.reset_peak_memory_stats(device)
    job.step()
    wait(device)
    return float(torch.cuda.max_memory_allocated(device) - sum(tensor.nbytes for tensor in unused))


def costs_here(device: torch.device) -> CostModel:
    """Measured costs of the model's operators."""
    model, batch = (make(transformers(device), device, torch.float32) for make in (model_of, batch_of))
    cluster = resolved(None, dist.get_world_size(), device_type=device.type)
    return measured_costs(
        capture_step(model, batch), model, batch, Options(), cluster, device=device, context=nullcontext
    )


def eager(
    device: torch.device, tiny: bool, micro_batches: int, graphs: bool = False
) -> tuple[list[float], list[float]]:
    """Median seconds of forwards and backwards: all stages in this process, the undivided model over the same
    micro-batches, and over the whole mini-batch at once. First per step in a row of steps, then of one step alone.
    `graphs`: stages as CUDA graphs.
    """
    shape = replace(TINY if tiny else ordinary(device), micro_batches=micro_batches)
    with pipeline(device, shape, cuda_graphs=graphs) as job:
        for _ in range(3):
            job.step()
        reference = model_of(shape, device, torch.float32)
        undivided = (partial(gradients_of, reference, job.batch, count) for count in (micro_batches, 1))
        steps = (partial(job.engine.train_step, job.batch), *undivided)
        alone = [partial(_read, step, 1) for step in steps]
        rows = [partial(_read, step, STEPS) for step in steps]
        found = medians(device, 4 * STEPS, *rows, *alone)
        return [seconds / STEPS for seconds in found[: len(rows)]], found[len(rows) :]


def _read(step: Callable[[], Any], count: int) -> float:
    """Take some steps, and wait for the loss of the last one."""
    for _ in range(count):
        loss = step()
    return float(loss)


def sharded(device: torch.device, sharding: str) -> float:
    """Median seconds of a step of data parallelism over all processes, with its collectives."""
    whole = [{"modules": ["left", "right", "head", "@step"], "devices": [0]}]
    options = {"stages": whole, "num_pipelines": dist.get_world_size(), "sharding": sharding}
    with pipeline(device, ordinary(device), **options) as job:
        return medians(device, STEPS, job.step)[0]


def traced(device: torch.device, folder: str) -> tuple[int, float, float]:
    """Actions that a profile of one step names, their microseconds, and those of CUDA kernels; writes the trace."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with pipeline(device, ordinary(device), trace=True) as job:
        job.step()
        with torch.profiler.profile(activities=kinds) as profile:
            job.step()
            wait(device)
        session = job.engine.current
        names = set() if session is None or session.latest is None else {str(a) for a, *_ in session.latest.timings}
    path = f"{folder}/trace-{device.type}-rank{dist.get_rank()}.json"
    profile.export_chrome_trace(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    actions = [event for event in events if event["name"] in names and event.get("cat") == "user_annotation"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    return len(actions), _duration(actions), _duration(kernels)


def _duration(events: Iterable[Any]) -> float:
    return float(sum(event["dur"] for event in events))
