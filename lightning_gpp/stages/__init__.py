"""The code that runs a plan's stages: parts of a captured step, or modules that the user declared as stages."""

from lightning_gpp.stages.build import CapturedStage, Pipeline, build
from lightning_gpp.stages.declared import Declared, declare, is_declared
from lightning_gpp.stages.step import StepRunner, UserStep

__all__ = ["CapturedStage", "Declared", "Pipeline", "StepRunner", "UserStep", "build", "declare", "is_declared"]
