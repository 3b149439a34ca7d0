"""Measured costs of operators, on a device of this machine, one block of the model at a time."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture import Capture, batch_size_of
from lightning_gpp.capture.record import step_arguments
from lightning_gpp.cluster import Device
from lightning_gpp.costs.measured import BlockSeconds, MeasuredCosts, MeasuredSeconds, spread
from lightning_gpp.costs.model import Roofline
from lightning_gpp.errors import ConfigError
from lightning_gpp.measure.blocks import Block, Blocks, find_blocks
from lightning_gpp.measure.replica import filled, hollow_copy, random_like
from lightning_gpp.measure.store import EMPTY, Store, default_folder
from lightning_gpp.measure.timing import BlockTimer
from lightning_gpp.plan import SOURCE
from lightning_gpp.runtime.random import undisturbed
from lightning_gpp.runtime.stage import MicroBatch

MeasuringProgress = Callable[[int, int, str], None]
"""Called before each measurement with the number of those done, their total, and the block's name and samples."""

SECONDS_PER_BLOCK: Final = 0.2

OWN_CACHE_BYTES: Final = 1 << 20
"""Bytes that stay in the cache that a core of a server has for itself."""


def measure_costs(
    capture: Capture,
    module: nn.Module,
    batch: Any,
    *,
    device: Device,
    sizes: Sequence[int],
    torch_device: torch.device | str = "cpu",
    num_pieces: float = inf,
    num_threads: int = 1,
    cache: str | Path | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    budget: float = SECONDS_PER_BLOCK,
    progress: MeasuringProgress | None = None,
) -> MeasuredCosts:
    """Measure the costs of the operators of a captured model on this machine's device.

    The model is cut into blocks at module borders. Each block runs alone, on the batch or on random inputs of its
    captured shapes. Blocks with equal content are measured once, and never again on this kind of device with this
    version of PyTorch. The module and the random streams do not change. It takes the memory of the largest block.

    Args:
        capture: capture of the module's training step.
        module: the module; may be on the meta device.
        batch: a mini-batch with real tensors.
        device: the cluster's device that `torch_device` represents.
        sizes: samples of micro-batches; two or more, so that costs hold for other sizes, too.
        torch_device: device to measure on, "cpu" or "cuda:0".
        num_pieces: a block has at most 1 / `num_pieces` of the roofline model's seconds, unless it cannot be divided.
        num_threads: threads of a CPU; processes of a pipeline use 1. The previous number is restored.
        cache: folder of the cache; None is `store.default_folder()`.
        context: context in which modules compute, for example autocast, as in the capture.
        budget: seconds for each block and size; each is repeated at least 3 times.
        progress: called before each measurement.

    Raises:
        ConfigError: the sizes do not fit the batch, or the batch has no values.
        CaptureError: the model cannot run, not even as one block.
    """
    sizes = _checked_sizes(sizes, batch)
    place = torch.device(torch_device)
    cold = place.type == "cpu" and _is_cold(capture, sizes[0])
    roofline = Roofline(capture.graph)
    expected = {operator.name: sum(roofline.seconds(operator, sizes[-1], device)) for operator in capture.graph}
    replica = hollow_copy(module, place)
    blocks = find_blocks(capture, replica, expected, num_pieces)
    store = Store(default_folder() if cache is None else cache, _kind(place, num_threads, cold))
    todo = _missing(blocks, sizes, store)
    if todo or EMPTY not in store.figures:
        with _prepared(place, num_threads):
            timer = partial(BlockTimer, device=place, context=context, budget=budget, cold=cold)
            bench = _Bench(capture, blocks, replica, module, place, timer)
            bench.run(batch, todo, store, progress)
    measured = [
        BlockSeconds(operators=block.operators, points={size: store.figures[block.content, size] for size in sizes})
        for block in blocks.blocks
    ]
    name = f"measured on {store.device}, torch {torch.__version__}"
    table = spread(capture.graph, measured, device, name, store.figures[EMPTY].again)
    return MeasuredCosts(table, device.name)


def _missing(blocks: Blocks, sizes: Sequence[int], store: Store) -> list[tuple[Block, int]]:
    """Blocks and sizes that the store does not know, one for equal content."""
    unique = {block.content: block for block in reversed(blocks.blocks)}
    return [(block, size) for size in sizes for block in unique.values() if (block.content, size) not in store.figures]


class _Bench:
    """Moves blocks to the device, one at a time, and times them."""

    def __init__(
        self,
        capture: Capture,
        blocks: Blocks,
        replica: nn.Module,
        module: nn.Module,
        device: torch.device,
        timer: Callable[..., BlockTimer],
    ) -> None:
        self._capture, self._blocks, self._device = capture, blocks, device
        self._replica, self._module = replica, module
        self._step = blocks.pipeline.step
        self._timer = timer(after=self._forget)

    def run(
        self, batch: Any, todo: Sequence[tuple[Block, int]], store: Store, progress: MeasuringProgress | None
    ) -> None:
        step = getattr(self._replica, self._capture.step)
        arguments = step_arguments(step, 0)
        batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), batch)
        store.figures.setdefault(EMPTY, MeasuredSeconds(0.0, again=self._timer.seconds_per_rerun))
        self._step.begin(batch, lambda samples: step(samples, *arguments), seed=0)
        try:
            for done, (block, size) in enumerate(todo):
                if progress is not None:
                    progress(done, len(todo), f"{block.name}, {size} samples")
                store.figures[block.content, size] = self._measure(block, size)
        finally:
            self._step.end()
            store.save()

    def _forget(self) -> None:
        """Drop the results of the user's step."""
        self._step.outputs.clear()

    def _measure(self, block: Block, size: int) -> MeasuredSeconds:
        pipeline = self._blocks.pipeline
        names = (*pipeline.parameters[block.stage], *pipeline.buffers[block.stage])
        micro_batch = MicroBatch(0, 0, size, self._capture.batch_size)
        with filled(self._replica, self._module, names, self._device):
            values = self._values(block, micro_batch)
            return self._timer.seconds(pipeline.stages[block.stage], values, micro_batch)

    def _values(self, block: Block, micro_batch: MicroBatch) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        edges = zip(self._blocks.plan.edges, self._blocks.pipeline.slots, strict=True)
        for edge, slots in edges:
            if edge.dst != block.stage:
                continue
            given = self._step.inputs(micro_batch) if edge.src == SOURCE else {}
            for slot in slots:
                value = given.get(slot.name)
                if value is None:
                    sizes = slot.spec.sizes(micro_batch.num_samples)
                    value = random_like(sizes, getattr(torch, slot.spec.dtype), self._device)
                values[slot.name] = value.detach().requires_grad_(slot.spec.requires_grad)
        return values


def _checked_sizes(sizes: Sequence[int], batch: Any) -> list[int]:
    total = batch_size_of(batch)
    if not sizes or not all(1 <= size <= total for size in sizes):
        raise ConfigError(
            f"Costs cannot be measured with micro-batches of {list(sizes)} samples; give one or more sizes from 1 to "
            f"{total}, the samples of the batch."
        )
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(batch)):
        raise ConfigError("Costs cannot be measured with a batch on the meta device; give one with real tensors.")
    return sorted(set(sizes))


@contextmanager
def _prepared(device: torch.device, num_threads: int) -> Iterator[None]:
    """Use the threads of a pipeline's process; restore them, and the random streams, at the end."""
    before = torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(undisturbed())
        stack.enter_context(torch.enable_grad())
        if device.type == "cuda":
            stack.enter_context(torch.random.fork_rng([device]))
        else:
            stack.callback(torch.set_num_threads, before)
            torch.set_num_threads(num_threads)
        yield


def _is_cold(capture: Capture, num_samples: int) -> bool:
    """True if the rest of a step takes the caches from one run of a block to the next."""
    graph = capture.graph
    touched = 2 * sum(graph.parameter_bytes.values()) + sum(op.saved_bytes.at(num_samples) for op in graph)
    return touched > OWN_CACHE_BYTES


def _kind(device: torch.device, num_threads: int, cold: bool) -> str:
    """A description of everything that determines the speed of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return f"{_processor()}, {threads}{', cold caches' * cold}"


def _processor() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # the file exists on Linux only
        names = []
    return next(iter(names), platform.processor() or platform.machine() or os.name)
