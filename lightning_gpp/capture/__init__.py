"""Capture: records what a step computes, on fake tensors, as a graph of operators."""

from lightning_gpp.capture.batch import batch_size_of, slice_batch
from lightning_gpp.capture.captured import Capture, capture_step

__all__ = ["Capture", "batch_size_of", "capture_step", "slice_batch"]
