"""Measured costs of operators, on a device of this machine, one block of the model at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture import Capture, batch_size_of
from lightning_gpp.capture.record import step_arguments
from lightning_gpp.cluster import Device
from lightning_gpp.costs.measured import BlockSeconds, MeasuredCosts, spread
from lightning_gpp.costs.model import Roofline
from lightning_gpp.errors import ConfigError
from lightning_gpp.measure.blocks import Block, Blocks, find_blocks
from lightning_gpp.measure.replica import filled, hollow_copy, random_like
from lightning_gpp.measure.timing import BlockTimer
from lightning_gpp.plan import SOURCE
from lightning_gpp.runtime.random import undisturbed
from lightning_gpp.runtime.stage import MicroBatch

SECONDS_PER_BLOCK: Final = 0.2


def measure_costs(
    capture: Capture,
    module: nn.Module,
    batch: Any,
    *,
    device: Device,
    sizes: Sequence[int],
    torch_device: torch.device | str = "cpu",
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    budget: float = SECONDS_PER_BLOCK,
) -> MeasuredCosts:
    """Measure the costs of the operators of a captured model on this machine's device.

    The model is cut into blocks at module borders. Each block runs alone, on the batch or on random inputs of its
    captured shapes. Of blocks with the same operators on the same shapes one is measured. The module and the random
    streams do not change. It takes the memory of the largest block.

    Args:
        capture: capture of the module's training step.
        module: the module; may be on the meta device.
        batch: a mini-batch with real tensors.
        device: the cluster's device that `torch_device` represents.
        sizes: samples of micro-batches; two or more, so that costs hold for other sizes, too.
        torch_device: device to measure on, "cpu" or "cuda:0".
        context: context in which modules compute, for example autocast, as in the capture.
        budget: seconds for each block and size.

    Raises:
        ConfigError: the sizes do not fit the batch, or the batch has no values.
        CaptureError: the model cannot run, not even as one block.
    """
    sizes = _checked_sizes(sizes, batch)
    place = torch.device(torch_device)
    roofline = Roofline(capture.graph)
    expected = {operator.name: sum(roofline.seconds(operator, sizes[-1], device)) for operator in capture.graph}
    replica = hollow_copy(module, place)
    blocks = find_blocks(capture, replica, expected)
    unlike = {block.content: block for block in reversed(blocks.blocks)}
    streams = torch.random.fork_rng([place], enabled=place.type == "cuda")
    with undisturbed(), torch.enable_grad(), streams:
        step = blocks.pipeline.step
        timer = BlockTimer(place, context, budget, after=lambda: step.outputs.clear())
        bench = _Bench(capture, blocks, replica, module, timer)
        points = {content: bench.run(batch, block, sizes) for content, block in unlike.items()}
    measured = [BlockSeconds(operators=block.operators, points=points[block.content]) for block in blocks.blocks]
    return spread(capture.graph, measured, device, f"measured on {device.name}, torch {torch.__version__}")


class _Bench:
    """Moves blocks to the device, one at a time, and times them."""

    def __init__(
        self, capture: Capture, blocks: Blocks, replica: nn.Module, module: nn.Module, timer: BlockTimer
    ) -> None:
        self._capture, self._blocks, self._timer = capture, blocks, timer
        self._replica, self._module = replica, module
        self._step = blocks.pipeline.step

    def run(self, batch: Any, block: Block, sizes: Sequence[int]) -> dict[int, tuple[float, float]]:
        """The block's seconds, of a forward and of its backward, by the samples of the micro-batch."""
        step = getattr(self._replica, self._capture.step)
        arguments = step_arguments(step, 0)
        batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._timer.device), batch)
        self._step.begin(batch, lambda samples: step(samples, *arguments), seed=0)
        pipeline = self._blocks.pipeline
        names = (*pipeline.parameters[block.stage], *pipeline.buffers[block.stage])
        try:
            with filled(self._replica, self._module, names, self._timer.device):
                return {size: self._seconds(block, size) for size in sizes}
        finally:
            self._step.end()

    def _seconds(self, block: Block, size: int) -> tuple[float, float]:
        micro_batch = MicroBatch(0, 0, size, self._capture.batch_size)
        values, stage = self._values(block, micro_batch), self._blocks.pipeline.stages[block.stage]
        return self._timer.seconds(stage, values, micro_batch)

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
                    value = random_like(sizes, getattr(torch, slot.spec.dtype), self._timer.device)
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
