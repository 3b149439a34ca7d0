from lightning_gpp.capture.batch import batch_size_of, slice_batch
from lightning_gpp.capture.captured import Capture, capture
from lightning_gpp.capture.declared import Declared, declare, is_declared
from lightning_gpp.capture.pipeline import CapturedStage, Pipeline
from lightning_gpp.capture.step import StepRunner, UserStep

__all__ = [
    "Capture",
    "CapturedStage",
    "Declared",
    "Pipeline",
    "StepRunner",
    "UserStep",
    "batch_size_of",
    "capture",
    "declare",
    "is_declared",
    "slice_batch",
]
