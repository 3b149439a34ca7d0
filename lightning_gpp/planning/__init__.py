"""Planning: finds a plan for a captured model with a partitioner, or builds the one that the user describes."""

from lightning_gpp.planning.assignment.estimate import estimate
from lightning_gpp.planning.assignment.layout import count_pipelines, devices_per_pipeline, number_devices
from lightning_gpp.planning.assignment.manual import check_model, manual
from lightning_gpp.planning.partitioners import edgepipe as _edgepipe  # noqa: F401  registers itself
from lightning_gpp.planning.partitioners import graphpipe as _graphpipe  # noqa: F401  registers itself
from lightning_gpp.planning.partitioners import pipedream as _pipedream  # noqa: F401  registers itself
from lightning_gpp.planning.partitioners import piper as _piper  # noqa: F401  registers itself
from lightning_gpp.planning.partitioners.auto import search as _auto  # noqa: F401  registers itself
from lightning_gpp.planning.problem.draft import Draft, DraftStage
from lightning_gpp.planning.problem.evaluate import Evaluation, Evaluator
from lightning_gpp.planning.problem.partitioner import (
    Answer,
    SearchControl,
    partitioner_names,
    register_partitioner,
)
from lightning_gpp.planning.problem.prediction import Prediction
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.request import Request
from lightning_gpp.planning.search import best_order, best_plan

__all__ = [
    "Answer",
    "Draft",
    "DraftStage",
    "Evaluation",
    "Evaluator",
    "Prediction",
    "Problem",
    "Request",
    "SearchControl",
    "best_order",
    "best_plan",
    "check_model",
    "count_pipelines",
    "devices_per_pipeline",
    "estimate",
    "manual",
    "number_devices",
    "partitioner_names",
    "register_partitioner",
]
