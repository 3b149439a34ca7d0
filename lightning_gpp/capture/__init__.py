from lightning_gpp.capture.batch import batch_size_of, slice_batch
from lightning_gpp.capture.captured import Capture, capture
from lightning_gpp.capture.pipeline import CapturedStage, Pipeline
from lightning_gpp.capture.step import UserStep

__all__ = ["Capture", "CapturedStage", "Pipeline", "UserStep", "batch_size_of", "capture", "slice_batch"]
