"""Stages: the modules that run a plan's stages, from a captured step or as the user declared them."""

from lightning_gpp.stages.build import CapturedStage, Pipeline, build
from lightning_gpp.stages.declared import Declared, declare, is_declared
from lightning_gpp.stages.step import StepRunner, UserStep

__all__ = ["CapturedStage", "Declared", "Pipeline", "StepRunner", "UserStep", "build", "declare", "is_declared"]
