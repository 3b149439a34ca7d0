"""Stages: the modules that run a plan's stages, from a captured step."""

from lightning_gpp.stages.build import Pipeline, build
from lightning_gpp.stages.step import CapturedStage, StepRunner
from lightning_gpp.stages.user_step import UserStep

__all__ = ["CapturedStage", "Pipeline", "StepRunner", "UserStep", "build"]
